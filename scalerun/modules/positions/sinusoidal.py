"""Fixed sine and cosine vectors for each position (Vaswani et al. 2017, arXiv:1706.03762).

B batch (or 1), T tokens, D model width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scalerun.modules.positions.base_position import AbsolutePosition
from scalerun.modules.positions.learned import OFFSET


class SinusoidalPositions(AbsolutePosition):
    """All sines, then all cosines, with fairseq's spacing; there is no longest position.

    With h = D / 2, row n holds ``sin(n w_k)`` and ``cos(n w_k)``, ``w_k = 10000**(-k / (h - 1))``.
    Rows are computed in float32 when they are needed: a stored table would lose its precision as
    soon as the model is cast.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim % 2 or dim < 4:
            raise ValueError(f"sinusoidal positions need an even width of at least 4, not {dim}")
        self.limit = None
        self.dim = dim

    def forward(self, positions_BT: Tensor) -> Tensor:
        half = self.dim // 2
        steps = torch.arange(half, dtype=torch.float32, device=positions_BT.device)
        frequencies = torch.exp(steps * -(math.log(10000) / (half - 1)))
        angle = (positions_BT + OFFSET).float().unsqueeze(-1) * frequencies
        return torch.cat((angle.sin(), angle.cos()), dim=-1)
