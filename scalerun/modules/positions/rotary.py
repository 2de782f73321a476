"""Rotary positions (Su et al. 2021, arXiv:2104.09864).

B batch (or 1), T tokens, K width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scalerun.modules.positions.base_position import BasePosition, Rotation


def angles(positions_BT: Tensor, head_dim: int) -> Tensor:
    """``n * 10000**(-2i / K)`` for position n and pair i: (B, 1, T, K / 2), float32.

    The order of operations is TorchScale's: other orders differ by 6e-5 at position 4096.
    """
    half = head_dim // 2
    steps = torch.arange(half, dtype=torch.float32, device=positions_BT.device)
    frequencies = 1.0 / (10000 ** (steps / half))
    return positions_BT.float()[:, None, :, None] * frequencies


class Rotary(BasePosition):
    """Turns pair i of a query or key at position n by ``n * 10000**(-2i / K)``.

    Pairs are neighbouring features, as in the paper.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary positions need an even width of a head, not {head_dim}")
        self.head_dim = head_dim

    def rotation(self, positions_BT: Tensor, *, center: int) -> Rotation:
        angle = angles(positions_BT, self.head_dim)
        table = torch.stack((angle.cos(), angle.sin()), dim=-1)
        return Rotation(queries=table, keys=table)
