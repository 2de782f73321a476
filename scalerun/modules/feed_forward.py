"""Per-token layers.

B batch, T time, D model width, F inner width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from scalerun.modules.auxiliary import Auxiliary
from scalerun.modules.block_context import BlockContext
from scalerun.modules.drop_path import dropout
from scalerun.modules.init import LinearInit
from scalerun.modules.linear import Linear

Activation = Callable[[Tensor], Tensor]
"""Elementwise. torch's kernels compute half-precision input in float32 and round the result."""


@dataclass(frozen=True)
class FeedForwardInit:
    """How the matrices start; ``gate`` is used by the gated form alone."""

    fc1: LinearInit
    fc2: LinearInit
    gate: LinearInit


class PerToken(nn.Module, ABC):
    """Computes on each token alone: (B, T, D) -> (B, T, D) and an auxiliary report or None."""

    has_auxiliary_loss: bool | None = None
    """Whether it reports one; None where that is not known before it computes."""

    @abstractmethod
    def forward(self, x_BTD: Tensor, context: BlockContext) -> tuple[Tensor, Auxiliary | None]: ...

    @abstractmethod
    def num_active_weights(self) -> int:
        """Weights that one token is multiplied with; no biases, no norms."""


class FeedForward(PerToken):
    """``fc2(norm(activation(fc1(x))))`` with biases; the norm belongs to SubLN (arXiv:2210.06423).

    Args:
        dim: D.
        ffn_dim: F.
        init: how the matrices start.
        activation: applied after ``fc1``.
        activation_dropout: rate of activations set to 0 in training.
        inner_norm: norm over the F activations, or None.
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
    ) -> None:
        super().__init__()
        self.activation = activation
        self.activation_dropout = activation_dropout
        self.fc1 = Linear(dim, ffn_dim, init=init.fc1)
        self.inner_norm = inner_norm
        self.fc2 = Linear(ffn_dim, dim, init=init.fc2)

    def forward(self, x_BTD: Tensor, context: BlockContext) -> tuple[Tensor, Auxiliary | None]:
        h_BTF = self.activation(self.fc1(x_BTD))
        h_BTF = dropout(h_BTF, self.activation_dropout, training=self.training)
        if self.inner_norm is not None:
            h_BTF = self.inner_norm(h_BTF)
        return self.fc2(h_BTF), None

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
    ) -> None:
        super().__init__()
        self.activation = activation
        self.activation_dropout = activation_dropout
        self.fc1 = Linear(dim, ffn_dim, init=init.fc1, bias=False)
        self.gate = Linear(dim, ffn_dim, init=init.gate, bias=False)
        self.inner_norm = inner_norm
        self.fc2 = Linear(ffn_dim, dim, init=init.fc2, bias=False)

    def forward(self, x_BTD: Tensor, context: BlockContext) -> tuple[Tensor, Auxiliary | None]:
        h_BTF = self.activation(self.fc1(x_BTD)) * self.gate(x_BTD)
        h_BTF = dropout(h_BTF, self.activation_dropout, training=self.training)
        if self.inner_norm is not None:
            h_BTF = self.inner_norm(h_BTF)
        return self.fc2(h_BTF), None

    def num_active_weights(self) -> int:
        return 3 * self.fc1.weight.numel()
