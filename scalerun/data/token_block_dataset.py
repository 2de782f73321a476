"""TokenBlockDataset: the documents of one shard, cut into sequences of equal length.

Sequences are cut over *targets*. The documents, each followed by its end symbol, form one stream.
A sequence is a span of the stream; its inputs are the same span moved one token to the left, and
the input before the first document is the end symbol, which so also means "a document begins".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from scalerun.data.token_file import TokenFile

BREAK_MODES = ("none", "complete", "eos", "eos_pad_8")
PADDED_TO = 8

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


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
    ``eos_pad_8`` likewise, padded to a multiple of 8 only.
    """

    break_mode: str
    tokens_per_sample: int
    split_long: bool
    """Cut a document that is longer than a sequence into several (else its end is dropped)."""
    context_window: int = 0
    """What is cut into several sequences repeats as many tokens before all but the first, to read
    them only."""

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
        self._sources = source_lengths(files, documents)
        self._spans = None
        if packing.break_mode != "none":
            self._spans = _spans(self._ends, packing, self._sources)
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
        return self.num_tokens - int((ends - starts).sum())

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
        given = None
        if repeated or self._sources is not None:
            given = np.arange(end - start) < repeated
        document = int(np.searchsorted(self._ends, at, side="right")) - 1
        starts = []
        while at < end:
            begin = int(self._ends[document])
            if begin >= start:
                starts.append(begin - start)
            if given is not None and self._sources is not None:
                source = begin + int(self._sources[document])
                given[max(begin - start, 0) : max(source - start, 0)] = True
            stop = min(int(self._ends[document + 1]), end)
            piece = self._document(document, at - begin, stop - begin)
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            at = stop
            document += 1
        length = self._packing.tokens_per_sample
        if self._packing.break_mode == "eos_pad_8":
            length = min(length, -(-(end - start) // PADDED_TO) * PADDED_TO)
        return TokenBlock(tokens, np.array(starts, dtype=np.int64), length, given)

    def _document(self, place: int, begin: int, end: int) -> npt.NDArray[Any]:
        number = self._documents[place]
        which = int(np.searchsorted(self._first_documents, number, side="right")) - 1
        file = self._files[which]
        offset = int(file.ends[number - self._first_documents[which]])
        return file.tokens[offset + begin : offset + end]


def document_lengths(files: Sequence[TokenFile]) -> Ints:
    """(N,) tokens of each document of a shard, its end included."""
    return np.concatenate([np.diff(file.ends) for file in files] or [np.empty(0, dtype=np.int64)])


def source_lengths(files: Sequence[TokenFile], documents: Ints) -> Ints | None:
    """(N,) tokens at the start of each of the documents that are no targets; None for none."""
    if all(file.sources is None for file in files):
        return None
    # A file without documents does not say that it has sources.
    parts = [np.empty(0, np.int64) if file.sources is None else file.sources for file in files]
    return np.concatenate(parts)[documents]


def _spans(ends: Ints, packing: Packing, sources: Ints | None) -> tuple[Ints, Ints, Ints]:
    """Starts and ends of the sequences of every mode but ``none``, and what they repeat before.

    A document that is too long loses the beginning of its source, so that its targets stay.
    """
    limit = packing.tokens_per_sample
    first, last = ends[:-1], ends[1:]
    if packing.break_mode == "complete":
        first, last = _whole_documents(ends, limit)
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


def _whole_documents(ends: Ints, limit: int) -> tuple[Ints, Ints]:
    """Spans of as many whole documents as fit into ``limit`` tokens, but at least one."""
    count = len(ends) - 1
    following = np.searchsorted(ends, ends[:-1] + limit, side="right") - 1
    following = np.maximum(following, np.arange(1, count + 1)).tolist()
    borders = [0]
    while borders[-1] < count:
        borders.append(following[borders[-1]])
    cuts = ends[np.array(borders)]
    return cuts[:-1], cuts[1:]
