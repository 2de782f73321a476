"""What a block must know of its sequences beside its input.

B batch, T new tokens, S keys (cached and new), M source tokens, H heads, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from scalerun.modules.incremental_state import LayerState
from scalerun.modules.positions.base_position import Rotation

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


@dataclass(frozen=True)
class Source:
    """The encoded sequence that a decoder's cross-attention reads."""

    features_BMD: Tensor
    bias_BHTM: Tensor | None = None
    """Added to the scores; -inf at padding of the source."""
    empty_rows_B1T1: Tensor | None = None
    """(B, 1, T, 1) bool, queries whose whole source is padding: they read 0."""


@dataclass(frozen=True)
class BlockContext:
    """Made once for all layers, but for ``state``."""

    causal: bool = False
    """Token t sees tokens 0..t of an equally long sequence, and ``bias_BHTS`` is None."""
    bias_BHTS: Tensor | None = None
    """(B or 1, H or 1, T, S), added to the scores; -inf where a key may not be seen."""
    empty_rows_B1T1: Tensor | None = None
    """(B, 1, T, 1) bool, queries that may see no key at all: their mixed output is 0."""
    rotation: Rotation | None = None
    """Turns queries and new keys."""
    padding_BS: Tensor | None = None
    """(B, S) bool, True where a key is padding; the last T columns are those of the new tokens."""
    positions_BT: Tensor | None = None
    """(B or 1, T) int64: how many tokens of the sequence, padding not counted, come before each."""
    start: int = 0
    """Tokens (padding included) already in ``state``."""
    state: LayerState | None = None
    """The layer's own decoding state, which differs from layer to layer."""
    source: Source | None = None
    """What cross-attention reads."""
    split: int | None = None
    """Multiway layers: tokens before it go through half A, the others through half B."""
    time_mesh: DeviceMesh | None = None
    """Axis that the tokens of the residual stream are spread over, in equal parts in their order;
    None where each rank has all of them. All other fields speak of all tokens."""

    def for_layer(self, state: LayerState) -> BlockContext:
        """The same for a layer with this decoding state."""
        # A tenth of the time of dataclasses.replace, and needed for every layer and token.
        context = object.__new__(BlockContext)
        context.__dict__.update(self.__dict__, state=state)
        return context

    def padding_of_new(self, num_tokens: int) -> Tensor | None:
        """(B, T) bool, which of the ``num_tokens`` new tokens are padding; None if none is."""
        return None if self.padding_BS is None else self.padding_BS[:, -num_tokens:]


NOTHING_KNOWN = BlockContext()
"""The context of a part that needs none."""


def spread_over(time_mesh: DeviceMesh | None) -> BlockContext:
    """A context that says nothing but where the tokens are."""
    return NOTHING_KNOWN if time_mesh is None else BlockContext(time_mesh=time_mesh)
