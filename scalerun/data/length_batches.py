"""Batches of sequences of similar length: which sequences each of them holds.

N sequences, S sides of each: 1, or 2 for a source and a target. K batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from scalerun.data.permutation import Purpose, permutation
from scalerun.dataclass.configs import DatasetConfig

Numbers = npt.NDArray[np.int64]

DEFAULT_MULTIPLE = 8


@dataclass(frozen=True)
class BatchLimits:
    """How large a batch may be; at least one limit is given."""

    max_sentences: int | None = None
    """Sequences."""
    max_tokens: int | None = None
    """Tokens of each side with its padding: sequences times the length of the longest."""
    multiple: int = DEFAULT_MULTIPLE
    """Where the tokens allow more sequences than this, their number is a multiple of it."""

    def fitting(self, longest_N: Numbers) -> int:
        """How many of these sequences, from the first on, make a batch.

        Args:
            longest_N: tokens of the longest side of each.

        Raises:
            ValueError: the first alone is above ``max_tokens``.
        """
        candidates = longest_N[: self.max_sentences]
        if self.max_tokens is None:
            return len(candidates)
        # No more than this many fit, since none of those that count is shorter than nothing.
        window = candidates[: max(self.max_tokens // max(int(candidates[0]), 1), 1)]
        padded = np.maximum.accumulate(window) * np.arange(1, len(window) + 1)
        number = int(np.searchsorted(padded, self.max_tokens, side="right"))
        if number == 0:
            raise ValueError(f"{candidates[0]} tokens do not fit into {self.max_tokens}")
        if number == len(candidates) or number < self.multiple:
            return number
        return number - number % self.multiple


def train_limits(cfg: DatasetConfig) -> BatchLimits:
    """The limits of training batches."""
    return BatchLimits(
        cfg.batch_size, cfg.max_tokens, cfg.required_batch_size_multiple or DEFAULT_MULTIPLE
    )


def valid_limits(cfg: DatasetConfig) -> BatchLimits:
    """The limits of validation batches: those of training where none are given."""
    return BatchLimits(
        cfg.batch_size_valid or cfg.batch_size,
        cfg.max_tokens_valid or cfg.max_tokens,
        cfg.required_batch_size_multiple or DEFAULT_MULTIPLE,
    )


@dataclass(frozen=True)
class LengthBatch:
    """Sequences that make one batch."""

    members: Numbers
    """Their numbers."""
    first: int
    """Sequences of the epoch before this batch."""


class LengthBatches(Sequence[LengthBatch]):
    """The batches of an epoch, in its order. Each sequence is in one of them.

    Sequences are sorted by length, and by a draw where lengths are equal; neighbours make a batch;
    the batches are permuted. All of it is a function of lengths, limits and key. Every key gives
    equally many batches.

    Args:
        lengths_NS: tokens of each side of each sequence.
        limits: how large a batch may be.
        key: seed and epoch; None leaves batches and equal lengths in their order.

    Raises:
        ValueError: a sequence is above the limit by itself.
    """

    def __init__(
        self, lengths_NS: Numbers, limits: BatchLimits, *, key: tuple[int, ...] | None = None
    ) -> None:
        self._order = _by_length(lengths_NS, key)
        borders = _cut(lengths_NS.max(axis=1)[self._order], limits)
        starts, ends = borders[:-1], borders[1:]
        if key is not None:
            turn = permutation(len(starts), *key, Purpose.BLOCKS)
            starts, ends = starts[turn], ends[turn]
        self._starts, self._ends = starts, ends
        sizes = ends - starts
        self._firsts = np.cumsum(sizes) - sizes

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> LengthBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[LengthBatch]: ...
    def __getitem__(self, index: int | slice) -> LengthBatch | list[LengthBatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start, end = self._starts[index], self._ends[index]
        return LengthBatch(self._order[start:end], int(self._firsts[index]))


def padding_share(batches: Sequence[LengthBatch], lengths_NS: Numbers) -> float:
    """Share of the places of all batches that padding fills, from 0 to 1."""
    places = sum(len(b.members) * int(lengths_NS[b.members].max(axis=0).sum()) for b in batches)
    return 1 - int(lengths_NS.sum()) / max(places, 1)


def _by_length(lengths_NS: Numbers, key: tuple[int, ...] | None) -> Numbers:
    """Numbers of the sequences, sorted by the last side and then by the others."""
    size = len(lengths_NS)
    ties = np.arange(size) if key is None else permutation(size, *key, Purpose.DOCUMENTS)
    last = lengths_NS[:, -1]
    # Up and down in turn, so that neighbours are alike also where the last side's length changes.
    others = lengths_NS[:, :-1] * (1 - 2 * (last % 2))[:, None]
    return np.lexsort((ties, *others.T, last)).astype(np.int64, copy=False)


def _cut(longest_N: Numbers, limits: BatchLimits) -> Numbers:
    """(K + 1,) where each batch begins, and the end."""
    borders = [0]
    while borders[-1] < len(longest_N):
        borders.append(borders[-1] + limits.fitting(longest_N[borders[-1] :]))
    return np.array(borders, dtype=np.int64)
