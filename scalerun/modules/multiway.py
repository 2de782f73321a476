"""Two copies of a layer, for two kinds of tokens in one sequence.

Source: Bao et al. 2021, arXiv:2111.02358; Wang et al. 2022, arXiv:2208.10442 (BEiT-3).
B batch, T tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from scalerun.modules.auxiliary import Auxiliary
from scalerun.modules.block_context import BlockContext
from scalerun.modules.per_token import PerToken
from scalerun.modules.positions.base_position import AbsolutePosition


class Multiway(nn.Module):
    """Half A for the tokens before the split, half B for those from it on.

    Args:
        a: the layer for the first kind of tokens.
        b: the layer for the second kind.
    """

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.A = a
        self.B = b
        self.tp_mesh = getattr(a, "tp_mesh", None)

    def forward(self, x_BT: Tensor, split: int | None) -> Tensor:
        """Both halves' outputs, joined.

        Args:
            x_BT: (B, T, ...).
            split: tokens of the first kind, counted from the left; None if all are.
        """
        if split is None or split >= x_BT.shape[1]:
            return self.A(x_BT)
        if split == 0:
            return self.B(x_BT)
        return torch.cat((self.A(x_BT[:, :split]), self.B(x_BT[:, split:])), dim=1)


class MultiwayPositions(AbsolutePosition):
    """A table of positions for each kind of token; each half counts from its own first token."""

    def __init__(self, a: AbsolutePosition, b: AbsolutePosition) -> None:
        super().__init__()
        self.A = a
        self.B = b
        limits = [part.limit for part in (a, b) if part.limit is not None]
        self.limit = sum(limits) if len(limits) == 2 else None

    def forward(self, positions_BT: Tensor, split: int | None = None) -> Tensor:
        if split is None or split >= positions_BT.shape[1]:
            return self.A(positions_BT)
        second = self.B(positions_BT[:, split:] - split)
        return second if split == 0 else torch.cat((self.A(positions_BT[:, :split]), second), 1)


PAIRS = (Multiway, MultiwayPositions)


def route(layer: nn.Module, x_BT: Tensor, context: BlockContext) -> Tensor:
    """``layer(x)``, by halves if the layer is :class:`Multiway`."""
    if isinstance(layer, PAIRS):
        return layer(x_BT, context.split)
    return layer(x_BT)


class MultiwayPerToken(PerToken):
    """Two per-token parts, split as in :class:`Multiway`; neither may have an auxiliary loss."""

    has_auxiliary_loss = False

    def __init__(self, a: PerToken, b: PerToken) -> None:
        super().__init__()
        self.A = a
        self.B = b

    def forward(self, x_BTD: Tensor, context: BlockContext) -> tuple[Tensor, Auxiliary | None]:
        split, num_tokens = context.split, x_BTD.shape[1]
        if split is None or split >= num_tokens:
            return self.A(x_BTD, context)
        if split == 0:
            return self.B(x_BTD, context)
        halves = [
            part(x_BTD[:, tokens], replace(context, split=None))[0]
            for part, tokens in ((self.A, slice(split)), (self.B, slice(split, num_tokens)))
        ]
        return torch.cat(halves, dim=1), None

    def num_active_weights(self) -> int:
        return self.A.num_active_weights()
