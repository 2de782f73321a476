"""SentencePieceTokenizer: sentencepiece models, BPE or unigram."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece

from scalerun.data.tokenizers.base_tokenizer import (
    BOS_SYMBOLS,
    EOS_SYMBOLS,
    PAD_SYMBOLS,
    UNK_SYMBOLS,
    BaseTokenizer,
    Ids,
    content_digest,
)
from scalerun.data.tokenizers.dictionary import Dictionary
from scalerun.dataclass.errors import UserError

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How sentencepiece writes a space inside a piece."""


class SentencePieceTokenizer(BaseTokenizer):
    """A sentencepiece model.

    Models with byte fallback and without a dummy prefix spell the character U+2581 in bytes:
    sentencepiece itself would read it back as a space.

    Args:
        path: the ``.model`` file.
        end_of_document_symbol: the piece that ends a document; None takes the model's end symbol.

    Raises:
        UserError: the file is no such model, or it has no symbol that can end a document.
    """

    def __init__(self, path: Path, end_of_document_symbol: str | None = None) -> None:
        content = path.read_bytes()
        try:
            if not content:
                raise RuntimeError("an empty file")
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise UserError(
                f"--tokenizer {path} is not a sentencepiece model; give a .model file, a "
                "tokenizers .json file, or the word bytes"
            ) from error
        self.path = path
        self.files = {path.name: path}
        self._size = int(self._model.vocab_size())
        self.dictionary = self._make_dictionary(content, end_of_document_symbol)
        self._dropped = self.dictionary.dropped_ids
        pieces = (f"<0x{byte:02X}>" for byte in SPACE.encode())
        ids = [self._find((piece,)) for piece in pieces]
        spelled = [index for index in ids if index is not None and self._model.is_byte(index)]
        has_prefix = self._model.encode("a", out_type=str)[0].startswith(SPACE)
        self._space_bytes = spelled if len(spelled) == len(ids) and not has_prefix else None

    def _find(self, symbols: Sequence[str]) -> int | None:
        for symbol in symbols:
            index = int(self._model.piece_to_id(symbol))
            if 0 <= index < self._size and self._model.id_to_piece(index) == symbol:
                return index
        return None

    def _role(self, index: int, symbols: Sequence[str]) -> int | None:
        return index if index >= 0 else self._find(symbols)

    def _make_dictionary(self, content: bytes, end_symbol: str | None) -> Dictionary:
        bos = self._role(self._model.bos_id(), BOS_SYMBOLS)
        pad = self._role(self._model.pad_id(), PAD_SYMBOLS)
        if end_symbol is None:
            eos = self._role(self._model.eos_id(), EOS_SYMBOLS)
            eos = bos if eos is None else eos
        else:
            eos = self._find((end_symbol,))
        if eos is None:
            wanted = "an end-of-text symbol" if end_symbol is None else f"the piece {end_symbol!r}"
            raise UserError(
                f"{self.path} has no piece for {wanted}; name one of its pieces with "
                "--end-of-document-symbol"
            )
        return Dictionary(
            num_real_symbols=self._size + (pad is None),
            adds_pad=pad is None,
            bos=eos if bos is None else bos,
            pad=self._size if pad is None else pad,
            eos=eos,
            unk=self._role(self._model.unk_id(), UNK_SYMBOLS),
            digest=content_digest("sentencepiece", content, str(eos)),
        )

    def pieces(self) -> list[tuple[str, float | None]]:
        """Each piece with its score; None for one that no text is spelled with."""
        model = self._model
        spelled = [
            not (model.is_control(i) or model.is_unknown(i) or model.is_byte(i))
            for i in range(self._size)
        ]
        return [
            (self.piece(i), float(model.get_score(i)) if spelled[i] else None)
            for i in range(self._size)
        ]

    def use_rows(self, num_rows: int) -> None:
        super().use_rows(num_rows)
        self._dropped = self.dictionary.dropped_ids

    def encode(self, text: str) -> list[int]:
        if self._space_bytes is None or SPACE not in text:
            return self._model.encode(text, out_type=int)
        ids: list[int] = []
        for i, part in enumerate(text.split(SPACE)):
            ids += self._space_bytes if i else []
            ids += self._model.encode(part, out_type=int)
        return ids

    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 1) -> Sequence[Ids]:
        ids: list[list[int]] = self._model.encode(
            list(texts), out_type=int, num_threads=num_threads
        )
        if self._space_bytes is not None:
            for i, text in enumerate(texts):
                if SPACE in text:
                    ids[i] = self.encode(text)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([index for index in ids if index not in self._dropped])

    def token_text(self, index: int) -> str:
        return self.piece(index).replace(SPACE, " ")

    def piece(self, index: int) -> str:
        if index >= self._size:
            return "<pad>" if index == self.dictionary.pad else f"<filler {index}>"
        return str(self._model.id_to_piece(index))
