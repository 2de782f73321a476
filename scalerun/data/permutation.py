"""Seeded permutations that stay the same in every version of numpy."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt


class Purpose(IntEnum):
    """What a permutation is for, so that no two of them are alike."""

    DOCUMENTS = 0
    BLOCKS = 1
    REMAINDER = 2


def permutation(size: int, *key: int) -> npt.NDArray[np.int64]:
    """A random order of 0..size-1 that depends on the integers ``key`` alone.

    Sorts 64-bit keys of a bit generator: numpy promises the raw bits of its generators forever,
    but not how its own permutation uses them.
    """
    keys = np.random.PCG64(np.random.SeedSequence(key)).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def uniform(*key: int) -> float:
    """A random number from 0 to below 1 that depends on the integers ``key`` alone."""
    bits = int(np.random.PCG64(np.random.SeedSequence(key)).random_raw())
    return (bits >> 11) / (1 << 53)
