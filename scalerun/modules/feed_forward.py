"""Per-token layers.

B batch, T time, D model width, F inner width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from scalerun.modules.activations import Activation
from scalerun.modules.auxiliary import Auxiliary
from scalerun.modules.block_context import BlockContext
from scalerun.modules.drop_path import dropout
from scalerun.modules.init import LinearInit
from scalerun.modules.megatron.layers import ColumnParallelLinear, RowParallelLinear
from scalerun.modules.megatron.mappings import enter
from scalerun.modules.norm import normed_inside
from scalerun.modules.per_token import PerToken

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


@dataclass(frozen=True)
class FeedForwardInit:
    """How the matrices start; ``gate`` is used by the gated form alone."""

    fc1: LinearInit
    fc2: LinearInit
    gate: LinearInit


class FeedForward(PerToken):
    """``fc2(norm(activation(fc1(x))))`` with biases; the norm belongs to SubLN (arXiv:2210.06423).

    Args:
        dim: D.
        ffn_dim: F.
        init: how the matrices start.
        activation: applied after ``fc1``.
        activation_dropout: rate of activations set to 0 in training.
        inner_norm: norm over the F activations, or None; spread as they are.
        tp_mesh: axis that the F activations are spread over, or None.
    """

    has_auxiliary_loss = False

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        *,
        init: FeedForwardInit,
        activation: Activation,
        activation_dropout: float = 0.0,
        inner_norm: nn.Module | None = None,
        tp_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.activation_dropout = activation_dropout
        self.tp_mesh = tp_mesh
        self.fc1 = ColumnParallelLinear(
            dim, ffn_dim, init=init.fc1, tp_mesh=tp_mesh, copy_input=False
        )
        self.inner_norm = inner_norm
        self.fc2 = RowParallelLinear(ffn_dim, dim, init=init.fc2, tp_mesh=tp_mesh)

    def forward(self, x_BTD: Tensor, context: BlockContext) -> tuple[Tensor, Auxiliary | None]:
        x_BTD = enter(x_BTD, self.tp_mesh, context.time_mesh)
        h_BTF = self.activation(self.fc1(x_BTD))
        h_BTF = dropout(h_BTF, self.activation_dropout, training=self.training, mesh=self.tp_mesh)
        if self.inner_norm is not None:
            h_BTF = normed_inside(self.inner_norm, h_BTF, self.tp_mesh, context)
        return self.fc2(h_BTF, context.time_mesh), None

    def num_active_weights(self) -> int:
        return self.fc1.weight.numel() + self.fc2.weight.numel()


class GLU(PerToken):
    """``fc2(activation(fc1(x)) * gate(x))`` without biases (Shazeer 2020, arXiv:2002.05202).

    As in TorchScale it is ``fc1`` that is activated, not ``gate``. Arguments as in
    :class:`FeedForward`.
    """

    has_auxiliary_loss = False

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        *,
        init: FeedForwardInit,
        activation: Activation,
        activation_dropout: float = 0.0,
        inner_norm: nn.Module | None = None,
        tp_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.activation_dropout = activation_dropout
        self.tp_mesh = tp_mesh
        self.fc1, self.gate = (
            ColumnParallelLinear(
                dim, ffn_dim, init=start, bias=False, tp_mesh=tp_mesh, copy_input=False
            )
            for start in (init.fc1, init.gate)
        )
        self.inner_norm = inner_norm
        self.fc2 = RowParallelLinear(ffn_dim, dim, init=init.fc2, bias=False, tp_mesh=tp_mesh)

    def forward(self, x_BTD: Tensor, context: BlockContext) -> tuple[Tensor, Auxiliary | None]:
        x_BTD = enter(x_BTD, self.tp_mesh, context.time_mesh)
        h_BTF = self.activation(self.fc1(x_BTD)) * self.gate(x_BTD)
        h_BTF = dropout(h_BTF, self.activation_dropout, training=self.training, mesh=self.tp_mesh)
        if self.inner_norm is not None:
            h_BTF = normed_inside(self.inner_norm, h_BTF, self.tp_mesh, context)
        return self.fc2(h_BTF, context.time_mesh), None

    def num_active_weights(self) -> int:
        return 3 * self.fc1.weight.numel()
