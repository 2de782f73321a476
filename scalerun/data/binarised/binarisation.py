"""Text files to items of token ids, batch by batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalerun.data.text.jsonl_dataset import BadRecord, parse_record, parse_text
from scalerun.data.text.text_stream import StreamError, read_lines
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.data.tokenizers.fairseq_dictionary import FILLER, NUM_SPECIAL
from scalerun.data.tokenizers.fairseq_tokenizer import SPECIAL_SYMBOLS
from scalerun.dataclass.errors import UserError

BATCH_BYTES = 1 << 20
JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


@dataclass(frozen=True)
class Lines:
    """Neighbouring lines of a text file."""

    path: Path
    first: int
    """Number of the first one, from 1."""
    lines: list[bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of the file that they take up, line feeds included."""
        return sum(map(len, self.lines)) + len(self.lines)

    def texts(self) -> Iterator[str]:
        """The text of each item: a line, or where the file has JSON lines, what ``text`` says.

        Raises:
            UserError: a line holds no text; names it.
        """
        is_json = self.path.name.lower().endswith(JSON_SUFFIXES)
        for number, line in enumerate(self.lines, start=self.first):
            try:
                if not is_json:
                    yield parse_text(line).rstrip("\n")
                elif line.strip():
                    yield parse_record(line)
            except BadRecord as error:
                raise UserError(f"{self.path}:{number}: {error}; repair or remove it") from error


def read_batches(path: Path) -> Iterator[Lines]:
    """The lines of a file, in batches of about :data:`BATCH_BYTES`.

    Raises:
        UserError: the file cannot be read to its end.
    """
    lines: list[bytes] = []
    first, size = 1, 0
    try:
        for line in read_lines(path):
            if isinstance(line, StreamError):
                raise UserError(f"{path}:{first + len(lines)}: {line}; make the file again")
            lines.append(line)
            size += len(line)
            if size >= BATCH_BYTES or len(lines) >= BATCH_BYTES >> 4:
                yield Lines(path, first, lines)
                first += len(lines)
                lines, size = [], 0
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if lines:
        yield Lines(path, first, lines)


@dataclass
class TextCounts:
    """What binarised text has."""

    items: int = 0
    """Lines, or documents of JSON lines."""
    tokens: int = 0
    """An end symbol for each item included."""
    unknown: int = 0
    """Tokens that are ``<unk>``."""
    bytes: int = 0
    """UTF-8 bytes of the text, without line ends."""

    def __add__(self, other: TextCounts) -> TextCounts:
        mine, theirs = asdict(self), asdict(other)
        return TextCounts(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(frozen=True)
class Binarised:
    """The items of a batch of lines."""

    tokens: npt.NDArray[Any]
    sizes: npt.NDArray[np.int64]
    """Tokens of each item."""
    counts: TextCounts
    num_bytes: int
    """Of the file, for whoever shows progress."""


class Binariser:
    """Lines to items of ids, each followed by the end symbol; an empty line has that alone.

    Args:
        tokenizer: makes the ids.
        dtype: their type.
    """

    def __init__(self, tokenizer: BaseTokenizer, dtype: np.dtype[Any]) -> None:
        self.tokenizer = tokenizer
        self.dtype = dtype

    def __call__(self, batch: Lines) -> Binarised:
        texts = list(batch.texts())
        own = self.tokenizer.dictionary
        end = np.array([own.eos], dtype=self.dtype)
        parts: list[npt.NDArray[Any]] = []
        ids = self.tokenizer.encode_batch(texts)
        for each in ids:
            parts += [np.asarray(each, dtype=self.dtype), end]
        tokens = np.concatenate(parts) if parts else np.empty(0, self.dtype)
        counts = TextCounts(
            items=len(texts),
            tokens=len(tokens),
            unknown=int((tokens == own.unk).sum()),
            bytes=sum(len(text.encode()) for text in texts),
        )
        sizes = np.array([len(each) + 1 for each in ids], dtype=np.int64)
        return Binarised(tokens, sizes, counts, batch.num_bytes)


@dataclass(frozen=True)
class WordCounts:
    """How often a batch of lines has each word."""

    words: Counter[str]
    num_bytes: int


def count_words(batch: Lines) -> WordCounts:
    """Count what white space parts."""
    words: Counter[str] = Counter()
    for text in batch.texts():
        words.update(text.split())
    return WordCounts(words, batch.num_bytes)


def choose_words(
    words: Counter[str], *, threshold: int = 0, num_words: int = -1
) -> list[tuple[str, int]]:
    """The words of a vocabulary and their counts: the frequent first, equal ones by the alphabet.

    Args:
        threshold: leave out words that are there less often.
        num_words: symbols at most, with fairseq's four; -1 for no limit.
    """
    ranked = sorted(words.items(), key=lambda entry: (-entry[1], entry[0]))
    chosen = [each for each in ranked if each[1] >= threshold and each[0] not in SPECIAL_SYMBOLS]
    return chosen if num_words < 0 else chosen[: max(num_words - NUM_SPECIAL, 0)]


def dictionary_text(symbols: list[tuple[str, int]], *, padding_factor: int) -> str:
    """A ``dict.txt``, filled up so that the vocabulary is a multiple of ``padding_factor``."""
    fillers = -(NUM_SPECIAL + len(symbols)) % padding_factor
    filled = symbols + [(f"{FILLER}{i:04d}", 0) for i in range(fillers)]
    return "".join(f"{symbol} {count}\n" for symbol, count in filled)
