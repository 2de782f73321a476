"""What every mixer (attention, retention, ...) has in common.

B batch, T new tokens, S keys (cached and new), H heads, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor, nn

from scalerun.modules.block_context import BlockContext
from scalerun.modules.incremental_state import LayerState

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


class Mixer(nn.Module, ABC):
    """Mixes tokens of a sequence: (B, T, D) -> (B, T, D)."""

    reads_bias: bool = True
    """Whether ``context.bias_BHTS`` and ``context.causal`` say which keys a query sees.

    A mixer that has a rule of its own says no, reads ``context.padding_BS`` and spares the model a
    tensor of T * S entries; masks of documents and relative biases are then refused."""

    tp_mesh: DeviceMesh | None = None
    """Axis that shares its heads. A mixer without one is whole on each rank of the axis, and is
    handed all tokens."""

    @abstractmethod
    def forward(self, x_BTD: Tensor, context: BlockContext) -> Tensor: ...

    @abstractmethod
    def init_state(self, batch_size: int, max_length: int) -> LayerState:
        """An empty decoding state for sequences of at most ``max_length`` tokens."""

    @abstractmethod
    def num_active_weights(self) -> int:
        """Weights that one token is multiplied with; no biases, no norms."""

    @abstractmethod
    def mixing_flops_per_token(self, sequence_length: int) -> int:
        """Floating-point operations of a token's forward and backward outside of the weights."""
