"""TokenBlockDataset: the documents of one shard, cut into sequences of equal length.

Sequences are cut over *targets*. The documents, each followed by its end symbol, form one stream.
A sequence is a span of the stream; its inputs are the same span moved one token to the left, and
the input before the first document is the end symbol, which so also means "a document begins".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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
Bools = npt.NDArray[np.bool_]


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

    @property
    def sources(self) -> Ints | None:
        """(N,) tokens at the start of each document that are no targets; None for none."""


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """One sequence of n targets."""

    tokens: npt.NDArray[Any]
    """(n + 1,) the first input, then the targets."""
    starts: Ints
    """Indices of the targets at which a document begins."""
    length: int
    """Length to which the sequence is padded; at least n."""
    given: Bools | None = None
    """(n,) which tokens are read only, not predicted; None for none."""


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
    context_window: int = 0
    """What is cut into several sequences repeats as many tokens before all but the first, to read
    them only."""

    def settings(self) -> str:
        """What decides which sequences a run is trained on; a window never does."""
        return repr(sorted((k, v) for k, v in asdict(self).items() if k != "context_window"))

    @property
    def stride(self) -> int:
        """Targets of a sequence that repeats tokens; above 0."""
        return self.tokens_per_sample - self.context_window

    def num_sequences(self, tokens: int) -> int:
        """Sequences that a stream of ``tokens`` is cut into in the mode ``none``."""
        return max(-(-(tokens - self.context_window) // self.stride), 1) if tokens else 0


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
        self._sources = source_lengths(files, documents)
        stops = np.empty(0, dtype=np.int64) if borders is None else borders
        self.num_separators = 0
        """Empty lines between texts, each one token, which no sequence holds."""
        if packing.break_mode == COMPLETE_DOC:
            separators = np.flatnonzero(lengths == SEPARATOR_TOKENS)
            self.num_separators = len(separators)
            stops = np.union1d(stops, separators)
        self._spans = None
        if packing.break_mode != "none":
            self._spans = _spans(self._ends, packing, stops, self._sources)
        self._order: Ints | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, ends included."""
        return int(self._ends[-1])

    @property
    def num_dropped(self) -> int:
        """Tokens of long documents that no sequence holds."""
        if self._spans is None:
            return 0
        starts, ends, _ = self._spans
        return self.num_tokens - self.num_separators - int((ends - starts).sum())

    @property
    def num_long(self) -> int:
        """Documents that are longer than a sequence."""
        return int((np.diff(self._ends) > self._packing.tokens_per_sample).sum())

    def reorder(self, order: Ints) -> None:
        """Give the sequences another order: the i-th is from now on the ``order[i]``-th."""
        self._order = order

    def __len__(self) -> int:
        if self._spans is not None:
            return len(self._spans[0])
        return self._packing.num_sequences(self.num_tokens)

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
            start = block * self._packing.stride
            end = min(start + self._packing.tokens_per_sample, self.num_tokens)
            repeated = self._packing.context_window if block else 0
        else:
            first, end, repeated = (int(each[block]) for each in self._spans)
            start = first - repeated
        return self._read(start, end, repeated)

    def _read(self, start: int, end: int, repeated: int) -> TokenBlock:
        """The tokens ``start..end-1`` of the stream; the first ``repeated`` are no targets."""
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
        return TokenBlock(
            tokens,
            begins[begins >= start] - start,
            length,
            self._given(start, end, repeated, slice(first, last)),
        )

    def _given(self, start: int, end: int, repeated: int, places: slice) -> Bools | None:
        """Which of the tokens ``start..end-1``, of the documents at some places, are no targets."""
        if not repeated and self._sources is None:
            return None
        given: Bools = np.arange(end - start) < repeated
        if self._sources is not None:
            begins = self._ends[places] - start
            stops = begins + self._sources[places]
            for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True):
                given[max(begin, 0) : max(stop, 0)] = True
        return given

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


def source_lengths(files: Sequence[TokenSource], documents: Ints) -> Ints | None:
    """(N,) tokens at the start of each of the documents that are no targets; None for none."""
    if all(file.sources is None for file in files):
        return None
    # A file without documents does not say that it has sources.
    parts = [np.empty(0, np.int64) if file.sources is None else file.sources for file in files]
    return np.concatenate(parts)[documents]


def _spans(
    ends: Ints, packing: Packing, stops: Ints, sources: Ints | None
) -> tuple[Ints, Ints, Ints]:
    """Starts and ends of the sequences of every mode but ``none``, and what they repeat before.

    A document that is too long loses the beginning of its source, so that its targets stay.
    """
    limit = packing.tokens_per_sample
    first, last = ends[:-1], ends[1:]
    if packing.break_mode == "complete":
        first, last = _whole_documents(ends, limit)
    elif packing.break_mode == COMPLETE_DOC:
        first, last = _whole_documents(ends, limit, stops)
        text = last - first > SEPARATOR_TOKENS
        first, last = first[text], last[text]
    if sources is not None:
        own = sources[np.searchsorted(ends, first, side="right") - 1]
        first = first + np.minimum(own, np.maximum(last - first - limit, 0))
    if not packing.split_long:
        return first, np.minimum(last, first + limit), np.zeros_like(first)
    window, stride = packing.context_window, packing.stride
    pieces = np.maximum(-(-(last - first - window) // stride), 1)
    number = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(first, pieces) + number * stride
    repeated = np.where(number > 0, window, 0)
    return starts + repeated, np.minimum(starts + limit, np.repeat(last, pieces)), repeated


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
