"""What every mixer (attention, retention, ...) has in common.

B batch, T new tokens, S keys (cached and new), H heads, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from scalerun.modules.incremental_state import LayerState
from scalerun.modules.positions.base_position import Rotation


@dataclass(frozen=True)
class BlockContext:
    """What a block must know of the sequence beside its input; made once for all layers."""

    causal: bool = False
    """Token t sees tokens 0..t of an equally long sequence, and ``bias_BHTS`` is None."""
    bias_BHTS: Tensor | None = None
    """(B or 1, H or 1, T, S), added to the scores; -inf where a key may not be seen."""
    empty_rows_B1T1: Tensor | None = None
    """(B, 1, T, 1) bool, queries that may see no key at all: their mixed output is 0."""
    rotation: Rotation | None = None
    """Turns queries and new keys."""
    start: int = 0
    """Tokens already in ``state``."""
    state: LayerState | None = None
    """The layer's own decoding state, which differs from layer to layer."""


class Mixer(nn.Module, ABC):
    """Mixes tokens of a sequence: (B, T, D) -> (B, T, D)."""

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
