"""XPos: rotary positions whose pairs also shrink with distance (Sun et al. 2022, arXiv:2212.10554).

B batch (or 1), T tokens, K width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scalerun.modules.positions.base_position import BasePosition, Rotation
from scalerun.modules.positions.rotary import angles

GAMMA = 0.4
"""The paper's smoothing constant."""


def pair_scales(head_dim: int, device: torch.device | None = None) -> Tensor:
    """The paper's zeta: (K / 2,) float32."""
    even = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    return (even + GAMMA * head_dim) / ((1.0 + GAMMA) * head_dim)


class XPos(BasePosition):
    """A query at n and a key at m meet with factor ``zeta_i**((n - m) / scale_base)`` in pair i.

    Queries carry ``zeta**((n - center) / base)``, keys its inverse, so that the center cancels and
    may be chosen for range: keys can be cached as they are once it is fixed.
    """

    def __init__(self, head_dim: int, scale_base: int = 512) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"XPos needs an even width of a head, not {head_dim}")
        self.head_dim = head_dim
        self.scale_base = scale_base

    def scales(self, positions_BT: Tensor, *, center: int) -> Tensor:
        """Factor of queries: (B, 1, T, K / 2) float32."""
        power = (positions_BT - center).float()[:, None, :, None] / self.scale_base
        return pair_scales(self.head_dim, positions_BT.device) ** power

    def rotation(self, positions_BT: Tensor, *, center: int) -> Rotation:
        angle = angles(positions_BT, self.head_dim)
        table = torch.stack((angle.cos(), angle.sin()), dim=-1)
        scale = self.scales(positions_BT, center=center).unsqueeze(-1)
        return Rotation(queries=table * scale, keys=table / scale)
