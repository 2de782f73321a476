"""JsonTokenizer: models of the `tokenizers` library, and GPT-2's vocabulary and merges."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from scalerun.data.tokenizers.base_tokenizer import (
    BOS_SYMBOLS,
    EOS_SYMBOLS,
    PAD_SYMBOLS,
    REPLACEMENT,
    UNK_SYMBOLS,
    BaseTokenizer,
    Ids,
    content_digest,
)
from scalerun.data.tokenizers.dictionary import Dictionary
from scalerun.dataclass.errors import UserError

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How vocabularies that come from sentencepiece write a space inside a token."""


class JsonTokenizer(BaseTokenizer):
    """A tokenizer of the `tokenizers` library.

    Args:
        model: the library's object; this class changes its settings.
        files: the files it was read from, by the name they have in a checkpoint.
        end_of_document_symbol: the token that ends a document; None looks for the usual names.

    Raises:
        UserError: no token can end a document.
    """

    def __init__(
        self,
        model: Tokenizer,
        files: dict[str, Path],
        end_of_document_symbol: str | None = None,
    ) -> None:
        self._model = model
        self._model.encode_special_tokens = True  # "</s>" inside a text is text
        self._model.no_truncation()
        self._model.no_padding()
        self.files = files
        self._vocabulary: dict[str, int] = model.get_vocab(with_added_tokens=True)
        self._size = max(self._vocabulary.values()) + 1
        self.dictionary = self._make_dictionary(end_of_document_symbol)
        added = model.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._dropped = self._without_text()

    def _without_text(self) -> frozenset[int]:
        return self.dictionary.dropped_ids | self._special - {self.dictionary.unk}

    def use_rows(self, num_rows: int) -> None:
        super().use_rows(num_rows)
        self._dropped = self._without_text()

    @classmethod
    def from_json(cls, path: Path, end_of_document_symbol: str | None = None) -> JsonTokenizer:
        """Read a ``tokenizer.json``.

        Raises:
            UserError: the file is not one.
        """
        content = path.read_bytes()
        try:
            model = Tokenizer.from_buffer(content)
        except ValueError as error:
            raise UserError(
                f"--tokenizer {path} is not a tokenizers .json file ({error}); give the "
                "tokenizer.json that the library saves"
            ) from error
        return cls(model, {path.name: path}, end_of_document_symbol)

    @classmethod
    def from_vocab_and_merges(
        cls, vocab: Path, merges: Path, end_of_document_symbol: str | None = None
    ) -> JsonTokenizer:
        """Read GPT-2's byte-level BPE: a JSON object of ids and a list of merges.

        Raises:
            UserError: a file has another form.
        """
        try:
            table = json.loads(vocab.read_bytes())
            lines = merges.read_text(encoding="utf-8").split("\n")
            rows = [line for line in lines if line.strip() and not line.startswith("#version")]
            pairs = [(left, right) for left, right in (row.split(" ") for row in rows)]
            if not table or not all(isinstance(index, int) for index in table.values()):
                raise ValueError("the vocabulary is not an object of ids")
            absent = next((a + b for a, b in pairs if a + b not in table), None)
            if absent is not None:
                raise ValueError(f"the merge result {absent!r} has no id")
        except (ValueError, AttributeError) as error:
            raise UserError(
                f"--vocab-filename {vocab} and --merges-filename {merges} are not a byte-level "
                f"BPE vocabulary with its merges ({error})"
            ) from error
        model = Tokenizer(models.BPE(vocab=table, merges=pairs))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        files = {"vocab.json": vocab, "merges.txt": merges}
        return cls(model, files, end_of_document_symbol)

    def _find(self, symbols: Sequence[str]) -> int | None:
        return next((self._vocabulary[s] for s in symbols if s in self._vocabulary), None)

    def _make_dictionary(self, end_symbol: str | None) -> Dictionary:
        bos, pad = self._find(BOS_SYMBOLS), self._find(PAD_SYMBOLS)
        eos = self._find(EOS_SYMBOLS if end_symbol is None else (end_symbol,))
        if eos is None:
            wanted = " or ".join(EOS_SYMBOLS) if end_symbol is None else repr(end_symbol)
            raise UserError(
                f"{next(iter(self.files.values()))} has no token {wanted}; name the token that "
                "ends a document with --end-of-document-symbol"
            )
        return Dictionary(
            num_real_symbols=self._size + (pad is None),
            adds_pad=pad is None,
            bos=eos if bos is None else bos,
            pad=self._size if pad is None else pad,
            eos=eos,
            unk=self._find(UNK_SYMBOLS),
            digest=content_digest(
                "tokenizers", *(path.read_bytes() for path in self.files.values()), str(eos)
            ),
        )

    def copied_model(self) -> Tokenizer:
        """The library's object once more."""
        return Tokenizer.from_str(self._model.to_str())

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 1) -> Sequence[Ids]:
        encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        kept = [index for index in ids if index not in self._dropped]
        return self._model.decode(kept, skip_special_tokens=False)

    def starts_word(self, index: int) -> bool:
        # Alone, a token that spells its space as sentencepiece does is decoded without it.
        name = self._model.id_to_token(index) or ""
        return name.startswith(SPACE) or super().starts_word(index)

    def piece(self, index: int) -> str:
        name = self._model.id_to_token(index)
        if name is None:
            return "<pad>" if index == self.dictionary.pad else f"<filler {index}>"
        return name

    def token_text(self, index: int) -> str:
        name = self.piece(index)
        if index in self._dropped:
            return name
        text = self._model.decode([index], skip_special_tokens=False)
        return name if not text or REPLACEMENT in text else text
