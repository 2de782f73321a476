"""TokenBlockDataset: the documents of one shard, cut into sequences of equal length.

Sequences are cut over *targets*. The documents, each followed by its end symbol, form one stream.
A sequence is a span of the stream; its inputs are the same span moved one token to the left, and
the input before the first document is the end symbol, which so also means "a document begins".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

BREAK_MODES = ("none", "complete", "eos", "eos_pad_8")
COMPLETE_DOC = "complete_doc"
"""A further mode, for data whose items are the lines of documents."""
PADDED_TO = 8
SEPARATOR_TOKENS = 1
"""An item with one token is an empty line: it has the end symbol alone."""

Ints = npt.NDArray[np.int64]


class TokenRow(Protocol):
    """Tokens that can be sliced, in memory or mapped into it."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Holds every token."""

    def __getitem__(self, part: slice, /) -> npt.NDArray[Any]: ...


class TokenSource(Protocol):
    """N documents: document i is ``tokens[ends[i] : ends[i + 1]]``."""

    @property
    def tokens(self) -> TokenRow:
        """All documents, one behind the other."""

    @property
    def ends(self) -> Ints:
        """(N + 1,) cumulative tokens."""

    @property
    def num_documents(self) -> int:
        """N."""


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
    ``eos_pad_8`` likewise, padded to a multiple of 8 only. Where the "documents" are lines,
    ``complete_doc`` takes whole lines as ``complete`` does, but ends a sequence where a text ends:
    at an empty line, which no sequence holds, or where the data say that a text begins.
    """

    break_mode: str
    tokens_per_sample: int
    split_long: bool
    """Cut a document that is longer than a sequence into several (else its end is dropped)."""


class TokenBlockDataset(Sequence[TokenBlock]):
    """The sequences of one shard, in a given order. Any one is found in O(log documents).

    Args:
        files: token files of the shard.
        documents: (N,) which documents, in which order; document i of the shard is numbered
            through the files. Repeats are allowed.
        packing: how they are cut.
        end_id: the end symbol.
        borders: places in that order at which ``complete_doc`` begins a sequence in any case.
    """

    def __init__(
        self,
        files: Sequence[TokenSource],
        documents: Ints,
        packing: Packing,
        *,
        end_id: int,
        borders: Ints | None = None,
    ) -> None:
        self._files = files
        self._documents = documents
        self._packing = packing
        self._end_id = end_id
        self._first_documents = np.cumsum([0] + [file.num_documents for file in files])
        lengths = document_lengths(files)[documents]
        self._ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        stops = np.empty(0, dtype=np.int64) if borders is None else borders
        self.num_separators = 0
        """Empty lines between texts, each one token, which no sequence holds."""
        if packing.break_mode == COMPLETE_DOC:
            separators = np.flatnonzero(lengths == SEPARATOR_TOKENS)
            self.num_separators = len(separators)
            stops = np.union1d(stops, separators)
        none = packing.break_mode == "none"
        self._spans = None if none else _spans(self._ends, packing, stops)
        self._order: Ints | None = None

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
        return self.num_tokens - self.num_separators - int((ends - starts).sum())

    def reorder(self, order: Ints) -> None:
        """Give the sequences another order: the i-th is from now on the ``order[i]``-th."""
        self._order = order

    def __len__(self) -> int:
        if self._spans is not None:
            return len(self._spans[0])
        return -(-self.num_tokens // self._packing.tokens_per_sample)

    @overload
    def __getitem__(self, index: int) -> TokenBlock: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenBlock]: ...
    def __getitem__(self, index: int | slice) -> TokenBlock | list[TokenBlock]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        block = index % len(self) if self._order is None else int(self._order[index])
        if self._spans is None:
            start = block * self._packing.tokens_per_sample
            end = min(start + self._packing.tokens_per_sample, self.num_tokens)
        else:
            start, end = int(self._spans[0][block]), int(self._spans[1][block])
        return self._read(start, end)

    def _read(self, start: int, end: int) -> TokenBlock:
        """The sequence whose targets are the tokens ``start..end-1`` of the stream."""
        at = max(start - 1, 0)
        tokens = np.empty(end - start + 1, dtype=self._files[0].tokens.dtype)
        tokens[0] = self._end_id  # stays where no token precedes the stream
        filled = at - start + 1
        first = int(np.searchsorted(self._ends, at, side="right")) - 1
        last = int(np.searchsorted(self._ends, end, side="left"))
        for low, high in self._runs(first, last):
            begin = int(self._ends[low])
            piece = self._run(low, max(at - begin, 0), min(int(self._ends[high]), end) - begin)
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
        begins = self._ends[first:last]
        length = self._packing.tokens_per_sample
        if self._packing.break_mode == "eos_pad_8":
            length = min(length, -(-(end - start) // PADDED_TO) * PADDED_TO)
        return TokenBlock(tokens, begins[begins >= start] - start, length)

    def _runs(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Parts of the places ``first..last-1`` whose documents are neighbours in one file."""
        numbers = self._documents[first:last]
        files = np.searchsorted(self._first_documents, numbers, side="right")
        cuts = np.flatnonzero((np.diff(numbers) != 1) | (np.diff(files) != 0)) + 1 + first
        borders = [first, *cuts.tolist(), last]
        return pairwise(borders)

    def _run(self, place: int, begin: int, end: int) -> npt.NDArray[Any]:
        """Tokens of a run, counted from the start of its first document."""
        number = self._documents[place]
        which = int(np.searchsorted(self._first_documents, number, side="right")) - 1
        file = self._files[which]
        offset = int(file.ends[number - self._first_documents[which]])
        return file.tokens[offset + begin : offset + end]


def document_lengths(files: Sequence[TokenSource]) -> Ints:
    """(N,) tokens of each document of a shard, its end included."""
    return np.concatenate([np.diff(file.ends) for file in files] or [np.empty(0, dtype=np.int64)])


def _spans(ends: Ints, packing: Packing, stops: Ints) -> tuple[Ints, Ints]:
    """Starts and ends in the stream of the sequences of every mode but ``none``."""
    limit = packing.tokens_per_sample
    first, last = ends[:-1], ends[1:]
    if packing.break_mode == "complete":
        first, last = _whole_documents(ends, limit)
    elif packing.break_mode == COMPLETE_DOC:
        first, last = _whole_documents(ends, limit, stops)
        text = last - first > SEPARATOR_TOKENS
        first, last = first[text], last[text]
    if not packing.split_long:
        return first, np.minimum(last, first + limit)
    pieces = np.maximum(-(-(last - first) // limit), 1)
    number = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(first, pieces) + number * limit
    return starts, np.minimum(starts + limit, np.repeat(last, pieces))


def _whole_documents(ends: Ints, limit: int, stops: Ints | None = None) -> tuple[Ints, Ints]:
    """Spans of as many whole documents as fit into ``limit`` tokens, but at least one.

    A document that ``stops`` names begins a span; where it is an empty line, it is one by itself.
    """
    count = len(ends) - 1
    following = np.searchsorted(ends, ends[:-1] + limit, side="right") - 1
    following = np.maximum(following, np.arange(1, count + 1))
    if stops is not None:
        stops = np.append(stops, count)
        nearest = stops[np.searchsorted(stops, np.arange(count), side="right")]
        alone = np.diff(ends) == SEPARATOR_TOKENS
        following = np.where(alone, np.arange(1, count + 1), np.minimum(following, nearest))
    after = following.tolist()
    borders = [0]
    while borders[-1] < count:
        borders.append(after[borders[-1]])
    cuts = ends[np.array(borders)]
    return cuts[:-1], cuts[1:]
