"""Sequences to one batch of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from scalerun.data.batch import IGNORE_INDEX, Batch
from scalerun.data.token_block_dataset import TokenBlock


@dataclass(frozen=True)
class Collater:
    """Makes batches.

    Args:
        pad_id: fills the inputs behind the end of a sequence.
        document_masking: say which document each position belongs to.
        reset_positions: count positions from the start of each document.
        empty_length: length of the one row, all padding, of a batch without sequences.
    """

    pad_id: int
    document_masking: bool = False
    reset_positions: bool = False
    empty_length: int = 1

    def __call__(self, blocks: Sequence[TokenBlock], sample_ids: Sequence[int]) -> Batch:
        """Pad sequences to the longest and stack them; given tokens and padding are no targets."""
        rows = max(len(blocks), 1)
        length = max((block.length for block in blocks), default=self.empty_length)
        tokens = np.full((rows, length), self.pad_id, dtype=np.int64)
        targets = np.full((rows, length), IGNORE_INDEX, dtype=np.int64)
        begins = np.zeros((rows, length), dtype=bool)
        num_targets = 0
        for i, block in enumerate(blocks):
            size = len(block.tokens) - 1
            tokens[i, :size] = block.tokens[:-1]
            targets[i, :size] = block.tokens[1:]
            if block.given is not None:
                targets[i, :size][block.given] = IGNORE_INDEX
                num_targets -= int(block.given.sum())
            begins[i, block.starts] = True
            if size < length:
                begins[i, size] = True  # padding is a document of its own
            num_targets += size
        positions = _positions(begins) if self.reset_positions else None
        document_ids = np.cumsum(begins, axis=1) if self.document_masking else None
        return Batch(
            tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(targets),
            num_targets=num_targets,
            sample_ids=list(sample_ids),
            positions=None if positions is None else torch.from_numpy(positions),
            document_ids=None if document_ids is None else torch.from_numpy(document_ids),
        )


def _positions(begins: np.ndarray) -> np.ndarray:
    """Distance of each place of a row to the last beginning before it, or to the row's start."""
    places = np.broadcast_to(np.arange(begins.shape[1]), begins.shape)
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
