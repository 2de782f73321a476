"""Seeded permutations and draws that stay the same in every version of numpy."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt


class Purpose(IntEnum):
    """What a permutation is for, so that no two of them are alike."""

    DOCUMENTS = 0
    BLOCKS = 1
    REMAINDER = 2
    MASK = 3


class Draws:
    """Random choices, one after the other, that depend on the integers ``key`` alone.

    They are made from the raw bits of a generator: numpy promises those forever, but not how its
    own permutations and draws use them.
    """

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(key))

    def uniform(self) -> float:
        """From 0 to below 1."""
        return (int(self._bits.random_raw()) >> 11) / (1 << 53)

    def round(self, number: float) -> int:
        """One of the two integers around a number that is not negative; the number on average."""
        return int(number + self.uniform())

    def permutation(self, size: int) -> npt.NDArray[np.int64]:
        """An order of 0..size-1."""
        keys = self._bits.random_raw(size)
        return np.argsort(keys, kind="stable").astype(np.int64, copy=False)

    def choose(self, size: int, count: int) -> npt.NDArray[np.int64]:
        """``count`` different numbers of 0..size-1, in ascending order."""
        return np.sort(self.permutation(size)[:count])

    def numbers(self, limit: int, count: int) -> npt.NDArray[np.int64]:
        """``count`` numbers from 0 to below ``limit``."""
        return (self._bits.random_raw(count) % np.uint64(limit)).astype(np.int64)


def permutation(size: int, *key: int) -> npt.NDArray[np.int64]:
    """A random order of 0..size-1 that depends on the integers ``key`` alone."""
    return Draws(*key).permutation(size)


def uniform(*key: int) -> float:
    """A random number from 0 to below 1 that depends on the integers ``key`` alone."""
    return Draws(*key).uniform()
