"""TokenBlockDataset: the documents of one shard, cut into sequences of equal length.

Sequences are cut over *targets*. The documents, each followed by its end symbol, form one stream.
A sequence is a span of the stream; its inputs are the same span moved one token to the left, and
the input before the first document is the end symbol, which so also means "a document begins".
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from scalerun.data.token_file import TokenFile

BREAK_MODES = ("none", "complete", "eos", "eos_pad_8")
PADDED_TO = 8

Ints = npt.NDArray[np.int64]
Block = TypeVar("Block")


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """One sequence of n targets."""

    tokens: npt.NDArray[Any]
    """(n + 1,) the first input, then the targets."""
    starts: Ints
    """Indices of the targets at which a document begins."""
    length: int
    """Length to which the sequence is padded; at least n."""


@dataclass(frozen=True)
class Packing:
    """How documents become sequences.

    Modes (``--sample-break-mode``): ``none`` cuts the stream every ``tokens_per_sample`` tokens;
    ``complete`` takes whole documents until the next does not fit; ``eos`` takes one document;
    ``eos_pad_8`` likewise, padded to a multiple of 8 only.
    """

    break_mode: str
    tokens_per_sample: int
    split_long: bool
    """Cut a document that is longer than a sequence into several (else its end is dropped)."""


class BlockDataset(Sequence[Block], Generic[Block]):
    """The sequences of one shard, in a given order."""

    _order: Ints | None = None

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens of all documents, ends included."""

    @property
    @abstractmethod
    def num_dropped(self) -> int:
        """Tokens that no sequence holds."""

    @abstractmethod
    def _block(self, number: int) -> Block:
        """One sequence, numbered in the order in which they were cut."""

    def reorder(self, order: Ints) -> None:
        """Give the sequences another order: the i-th is from now on the ``order[i]``-th."""
        self._order = order

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        return self._block(index % len(self) if self._order is None else int(self._order[index]))


class TokenBlockDataset(BlockDataset[TokenBlock]):
    """The sequences of one shard, in a given order. Any one is found in O(log documents).

    Args:
        files: token files of the shard.
        documents: (N,) which documents, in which order; document i of the shard is numbered
            through the files. Repeats are allowed.
        packing: how they are cut.
        end_id: the end symbol.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        documents: Ints,
        packing: Packing,
        *,
        end_id: int,
    ) -> None:
        self._files = files
        self._documents = documents
        self._packing = packing
        self._end_id = end_id
        self._first_documents = np.cumsum([0] + [file.num_documents for file in files])
        lengths = document_lengths(files)[documents]
        self._ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        self._spans = None if packing.break_mode == "none" else _spans(self._ends, packing)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, ends included."""
        return int(self._ends[-1])

    @property
    def num_dropped(self) -> int:
        """Tokens at the end of long documents that no sequence holds."""
        if self._spans is None:
            return 0
        starts, ends = self._spans
        return self.num_tokens - int((ends - starts).sum())

    def __len__(self) -> int:
        if self._spans is not None:
            return len(self._spans[0])
        return -(-self.num_tokens // self._packing.tokens_per_sample)

    def _block(self, number: int) -> TokenBlock:
        if self._spans is None:
            start = number * self._packing.tokens_per_sample
            end = min(start + self._packing.tokens_per_sample, self.num_tokens)
        else:
            start, end = int(self._spans[0][number]), int(self._spans[1][number])
        return self._read(start, end)

    def _read(self, start: int, end: int) -> TokenBlock:
        """The sequence whose targets are the tokens ``start..end-1`` of the stream."""
        at = max(start - 1, 0)
        tokens = np.empty(end - start + 1, dtype=self._files[0].tokens.dtype)
        tokens[0] = self._end_id  # stays where no token precedes the stream
        filled = at - start + 1
        document = int(np.searchsorted(self._ends, at, side="right")) - 1
        starts = []
        while at < end:
            begin = int(self._ends[document])
            if begin >= start:
                starts.append(begin - start)
            stop = min(int(self._ends[document + 1]), end)
            piece = self._document(document, at - begin, stop - begin)
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            at = stop
            document += 1
        length = self._packing.tokens_per_sample
        if self._packing.break_mode == "eos_pad_8":
            length = min(length, -(-(end - start) // PADDED_TO) * PADDED_TO)
        return TokenBlock(tokens, np.array(starts, dtype=np.int64), length)

    def _document(self, place: int, begin: int, end: int) -> npt.NDArray[Any]:
        number = self._documents[place]
        which = int(np.searchsorted(self._first_documents, number, side="right")) - 1
        file = self._files[which]
        offset = int(file.ends[number - self._first_documents[which]])
        return file.tokens[offset + begin : offset + end]


def document_lengths(files: Sequence[TokenFile]) -> Ints:
    """(N,) tokens of each document of a shard, its end included."""
    return np.concatenate([np.diff(file.ends) for file in files] or [np.empty(0, dtype=np.int64)])


def _spans(ends: Ints, packing: Packing) -> tuple[Ints, Ints]:
    """Starts and ends in the stream of the sequences of every mode but ``none``."""
    limit = packing.tokens_per_sample
    first, last = ends[:-1], ends[1:]
    if packing.break_mode == "complete":
        cuts = ends[whole_units(ends, limit)]
        first, last = cuts[:-1], cuts[1:]
    if not packing.split_long:
        return first, np.minimum(last, first + limit)
    pieces = np.maximum(-(-(last - first) // limit), 1)
    number = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(first, pieces) + number * limit
    return starts, np.minimum(starts + limit, np.repeat(last, pieces))


def whole_units(ends: Ints, limit: int, stops: Ints | None = None) -> Ints:
    """Borders of runs of as many units as fit into ``limit`` tokens, but at least one.

    Args:
        ends: (N + 1,) cumulative tokens of the units, such as documents.
        limit: tokens of a run.
        stops: (N,) for each unit, the number of the first one that no run may take with it.

    Returns:
        (runs + 1,) numbers of units: 0, then the end of each run.
    """
    count = len(ends) - 1
    following = np.searchsorted(ends, ends[:-1] + limit, side="right") - 1
    following = np.maximum(following, np.arange(1, count + 1))
    if stops is not None:
        following = np.minimum(following, stops)
    after = following.tolist()
    borders = [0]
    while borders[-1] < count:
        borders.append(after[borders[-1]])
    return np.array(borders)
