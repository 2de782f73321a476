"""PieceTokenizer: the pieces of a sentencepiece model, numbered by a ``dict.txt``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer, Ids, content_digest
from scalerun.data.tokenizers.dictionary import Dictionary
from scalerun.data.tokenizers.fairseq_dictionary import (
    BOS,
    EOS,
    FILLER,
    NUM_SPECIAL,
    PAD,
    UNK,
    read_fairseq_dictionary,
)
from scalerun.data.tokenizers.sentencepiece_tokenizer import SPACE
from scalerun.dataclass.errors import UserError

logger = logging.getLogger(__name__)

SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
MASK = "<mask>"
NUM_SENTINELS = 100
MODEL_FILE = "sentencepiece.bpe.model"
DICT_FILE = "dict.txt"
MULTIPLE = 8
"""The number of symbols is filled up to one of it."""


class PieceTokenizer(BaseTokenizer):
    """The vocabulary of fairseq's masked language models.

    ``<s>`` 0, ``<pad>`` 1, ``</s>`` 2, ``<unk>`` 3, the symbols of ``dict.txt`` in its order,
    ``<mask>``, ``<mask_0>`` to ``<mask_99>``, and made-up words up to a multiple of 8. A piece that
    the file does not list is ``<unk>``. Each line of a text is a sentence, with ``</s>`` between
    two of them.

    Args:
        model: the sentencepiece model.
        listing: the ``dict.txt``.

    Attributes:
        mask: number of ``<mask>``.
        num_listed: symbols of the file; they begin at :data:`NUM_SPECIAL`.

    Raises:
        UserError: a file is missing or is another one.
    """

    def __init__(self, model: Path, listing: Path) -> None:
        content = _read("--spm-model", model)
        try:
            if not content:
                raise RuntimeError("an empty file")
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise UserError(f"--spm-model {model} is not a sentencepiece model") from error
        numbers = read_fairseq_dictionary(listing, "--dict-file")
        self.files = {MODEL_FILE: model, DICT_FILE: listing}
        self.num_listed = len(numbers)
        self.mask = NUM_SPECIAL + len(numbers)
        own = [MASK, *(f"<mask_{i}>" for i in range(NUM_SENTINELS))]
        for symbol in (*SPECIAL_SYMBOLS, *own):
            if symbol in numbers:
                raise UserError(
                    f"--dict-file {listing}:{numbers[symbol] - NUM_SPECIAL + 1} has {symbol!r}, "
                    "which every vocabulary has by itself; take the line out"
                )
        self._symbols = [*SPECIAL_SYMBOLS, *numbers, *own]
        fillers = -len(self._symbols) % MULTIPLE
        self._symbols += [f"{FILLER}{i:04d}" for i in range(fillers)]
        self.dictionary = Dictionary(
            num_real_symbols=len(self._symbols),
            bos=BOS,
            pad=PAD,
            eos=EOS,
            unk=UNK,
            digest=content_digest("pieces", content, *self._symbols),
        )
        pieces = [self._model.id_to_piece(i) for i in range(self._model.vocab_size())]
        self._numbers = np.array([numbers.get(piece, UNK) for piece in pieces], dtype=np.int64)
        if (self._numbers == UNK).all():
            raise UserError(
                f"--dict-file {listing} lists no piece of --spm-model {model}; they are not one "
                "vocabulary"
            )
        missing = [
            piece
            for i, piece in enumerate(pieces)
            if piece not in numbers and not (self._model.is_control(i) or self._model.is_unknown(i))
        ]
        if missing:
            logger.warning(
                "--dict-file %s lacks %d of the %d pieces of --spm-model %s, the first is %r; they "
                "are read as <unk>; add them to the file if they should not be",
                listing, len(missing), len(pieces), model, missing[0],
            )  # fmt: skip

    def encode(self, text: str) -> list[int]:
        return np.asarray(self.encode_batch([text])[0]).tolist()

    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 1) -> Sequence[Ids]:
        documents = [text.split("\n") for text in texts]
        sentences = [sentence for document in documents for sentence in document]
        pieces = iter(self._model.encode(sentences, out_type=int, num_threads=num_threads))
        found: list[Ids] = []
        for document in documents:
            parts = [self._numbers[[*ids, 0]] for _, ids in zip(document, pieces, strict=False)]
            for part in parts:
                part[-1] = EOS
            found.append(np.concatenate(parts)[:-1])
        return found

    def decode(self, ids: Iterable[int]) -> str:
        dropped = self.dictionary.dropped_ids - {EOS}
        symbols = ["\n" if i == EOS else self._symbols[i] for i in ids if i not in dropped]
        lines = "".join(symbols).split("\n")
        return "\n".join(line.replace(SPACE, " ").removeprefix(" ") for line in lines)

    def token_text(self, index: int) -> str:
        if index >= len(self._symbols):
            return f"<filler {index}>"
        return self._symbols[index].replace(SPACE, " ")


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read: {error.strerror}") from error
