"""Logits a block of rows at a time."""

from __future__ import annotations

from torch import Tensor

BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**26}
"""Logits treated at a time: about a CPU's second-level cache; on a GPU, enough to fill it."""


def row_blocks(logits: Tensor) -> list[slice]:
    """Slices of the rows of (N, V) logits, of about ``BLOCK_ELEMENTS`` logits each."""
    num_rows, num_columns = logits.shape
    elements = BLOCK_ELEMENTS.get(logits.device.type, BLOCK_ELEMENTS["cuda"])
    step = max(1, elements // num_columns)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
