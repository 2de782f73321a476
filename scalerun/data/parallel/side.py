"""One side of pairs: the sources, or the targets, as rows of tokens.

N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from scalerun.data.length_batches import Numbers
from scalerun.data.text.jsonl_dataset import QuarantinedRecord
from scalerun.data.text.segment_dataset import SegmentFile
from scalerun.data.text.token_cache import TokenCache
from scalerun.data.text.token_file import TokenFile
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.dataclass.errors import UserError


class Rows(Protocol):
    """Where the tokens of a side are, and how its reader calls a row."""

    unit: str
    """What a row is: a line, an item."""

    @property
    def lengths_N(self) -> Numbers:
        """Tokens of each row, its end symbol included."""

    @property
    def has_text_N(self) -> npt.NDArray[np.bool_]:
        """Whether a row has something before its end."""

    @property
    def quarantined(self) -> Sequence[QuarantinedRecord]:
        """Rows that could not be read."""

    def row(self, index: int) -> npt.NDArray[Any]:
        """The tokens of a row, the end symbol last.

        Raises:
            UserError: they are damaged.
        """

    def place(self, index: int) -> tuple[str, int]:
        """The name of the file that has a row, and its number there, from 1."""

    def where(self, index: int) -> str:
        """The same for a message, with the path."""

    def num_bytes(self, used: Numbers) -> int:
        """UTF-8 bytes of the text of some rows; 0 where nobody counted them."""


@dataclass(frozen=True)
class Longest:
    """The longest sequence that the model takes, its end symbol included."""

    tokens: int | None
    flag: str
    """What sets it."""


@dataclass(frozen=True)
class Side:
    """Sources, or targets."""

    rows: Rows
    path: Path
    """The first file, for messages."""
    digest: str
    """Of what the rows are made from."""
    tokenizer: BaseTokenizer
    longest: Longest

    def text(self, index: int) -> str:
        """The text of a row."""
        return self.tokenizer.decode(self.rows.row(index)[:-1].tolist())

    def all_tokens(self) -> list[list[int]]:
        """The tokens of every row."""
        return [self.rows.row(index).tolist() for index in range(len(self.rows.lengths_N))]


def check_numbers(source: Side, target: Side) -> None:
    """Refuse sides that are not row by row translations of each other.

    Raises:
        UserError: they have different numbers of rows.
    """
    numbers = [len(side.rows.lengths_N) for side in (source, target)]
    if numbers[0] != numbers[1]:
        unit = source.rows.unit
        raise UserError(
            f"{source.path} has {numbers[0]} {unit}s and {target.path} has {numbers[1]}; {unit} n "
            f"of one has to be the translation of {unit} n of the other"
        )


class TextRows:
    """The lines of a text file, tokenised.

    Args:
        file: the text.
        tokens: what became of it.
    """

    unit = "line"

    def __init__(self, file: SegmentFile, tokens: TokenFile) -> None:
        self.file = file
        self.tokens = tokens
        self.lengths_N = np.diff(tokens.ends)
        self.has_text_N = tokens.document_bytes > 0

    @property
    def quarantined(self) -> Sequence[QuarantinedRecord]:
        """Bad records that the reader left out."""
        return self.tokens.quarantined

    def row(self, index: int) -> npt.NDArray[Any]:
        """The tokens of a line (from 0), with the end symbol."""
        ends = self.tokens.ends
        return self.tokens.tokens[ends[index] : ends[index + 1]]

    def place(self, index: int) -> tuple[str, int]:
        """The file's name, and the line from 1."""
        return self.file.name, index + 1

    def where(self, index: int) -> str:
        """``path:line``."""
        return f"{self.file.path}:{index + 1}"

    def num_bytes(self, used: Numbers) -> int:
        """UTF-8 bytes of some lines."""
        return int(self.tokens.document_bytes[used].sum())


def text_side(file: SegmentFile, cache: TokenCache, longest: Longest) -> Side:
    """A side that is a text file; it is tokenised now if need be.

    Raises:
        UserError: the file cannot be read, or has a bad record.
    """
    rows = TextRows(file, cache.load(file))
    digest = cache.digests.whole(file.path)
    cache.digests.save()
    return Side(rows, file.path, digest, cache.tokenizer, longest)
