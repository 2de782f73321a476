"""What every per-token part (feed-forward layer, mixture of experts, ...) has in common.

B batch, T time, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor, nn

from scalerun.modules.auxiliary import Auxiliary
from scalerun.modules.block_context import BlockContext

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


class PerToken(nn.Module, ABC):
    """Computes on each token alone: (B, T, D) -> (B, T, D) and an auxiliary report or None."""

    has_auxiliary_loss: bool | None = None
    """Whether it reports one; None where that is not known before it computes."""
    tp_mesh: DeviceMesh | None = None
    """Axis that shares its products. A part without one is whole on each rank of the axis, and is
    handed all tokens."""

    @abstractmethod
    def forward(self, x_BTD: Tensor, context: BlockContext) -> tuple[Tensor, Auxiliary | None]: ...

    @abstractmethod
    def num_active_weights(self) -> int:
        """Weights that one token is multiplied with; no biases, no norms."""
