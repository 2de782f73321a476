"""What a masked language model sees in one forward pass.

B sequences, T tokens, N selected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scalerun.data.batch import IGNORE_INDEX, Batch
from scalerun.data.masked.masking import MaskedBlock


@dataclass(frozen=True, kw_only=True)
class MaskedBatch(Batch):
    """A batch whose targets are what selected tokens were before they were hidden."""

    selected: Tensor
    """(N,) int64, where the targets are among the B * T tokens, row by row; ascending."""
    padding: Tensor | None
    """(B, T) bool, True for padding; None if there is none."""

    def net_input(self) -> dict[str, Tensor | None]:
        return {
            "tokens_BT": self.tokens,
            "padding_mask_BT": self.padding,
            "selected_N": self.selected,
        }


@dataclass(frozen=True)
class MaskedCollater:
    """Makes batches of masked sequences.

    Args:
        pad_id: fills what is behind the end of a sequence.
        length: tokens of a row; None for those of the longest sequence of the batch.
        empty_length: tokens of the one row, all padding, of a batch without sequences.
    """

    pad_id: int
    length: int | None
    empty_length: int

    def __call__(self, blocks: Sequence[MaskedBlock], sample_ids: Sequence[int]) -> MaskedBatch:
        """Pad sequences and stack them."""
        rows = max(len(blocks), 1)
        longest = max((len(block.tokens) for block in blocks), default=self.empty_length)
        length = self.length or longest
        tokens = np.full((rows, length), self.pad_id, dtype=np.int64)
        targets = np.full((rows, length), IGNORE_INDEX, dtype=np.int64)
        padding = np.ones((rows, length), dtype=bool)
        for i, block in enumerate(blocks):
            tokens[i, : len(block.tokens)] = block.tokens
            targets[i, block.places] = block.targets
            padding[i, : len(block.tokens)] = False
        selected = np.flatnonzero(targets != IGNORE_INDEX)
        return MaskedBatch(
            tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(targets),
            num_targets=len(selected),
            sample_ids=list(sample_ids),
            selected=torch.from_numpy(selected),
            padding=torch.from_numpy(padding) if padding.any() else None,
        )
