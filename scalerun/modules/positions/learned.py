"""A learned vector for each position. B batch (or 1), T tokens, D model width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalerun.modules.init import Initializer
from scalerun.modules.positions.base_position import AbsolutePosition

OFFSET = 2
"""Position 0 uses row 2, as in fairseq and TorchScale, where row 1 belonged to padding."""


class LearnedPositions(AbsolutePosition):
    """A table of ``num_positions + 2`` rows."""

    def __init__(self, num_positions: int, dim: int, *, init: Initializer) -> None:
        super().__init__()
        self.limit = num_positions
        self.init = init
        self.weight = nn.Parameter(torch.empty(num_positions + OFFSET, dim))

    def initializers(self) -> dict[str, Initializer]:
        return {"weight": self.init}

    def forward(self, positions_BT: Tensor) -> Tensor:
        return F.embedding(positions_BT + OFFSET, self.weight)
