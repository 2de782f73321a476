"""The block that every architecture is a stack of. B batch, T time, D model width."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from scalerun.modules.auxiliary import Auxiliary
from scalerun.modules.block_context import BlockContext
from scalerun.modules.incremental_state import BlockState, LayerState
from scalerun.modules.megatron.mappings import gather_from_sequence, scatter_to_sequence
from scalerun.modules.mixer import Mixer
from scalerun.modules.per_token import PerToken
from scalerun.modules.residual import Residual


class TransformerBlock(nn.Module):
    """Residual branches in order: mix tokens, read the source if there is one, compute per token.

    Args:
        mixer: mixes the tokens of the sequence.
        ffn: computes on each token alone.
        mixer_residual: surrounds the mixer.
        ffn_residual: surrounds the per-token part.
        cross_mixer: reads the encoded source (:attr:`BlockContext.source`); None without one.
        cross_residual: surrounds the cross mixer.
    """

    def __init__(
        self,
        mixer: Mixer,
        ffn: PerToken,
        *,
        mixer_residual: Residual,
        ffn_residual: Residual,
        cross_mixer: Mixer | None = None,
        cross_residual: Residual | None = None,
    ) -> None:
        super().__init__()
        self.mixer_residual = mixer_residual
        self.mixer = mixer
        self.cross_residual = cross_residual
        self.cross_mixer = cross_mixer
        self.ffn_residual = ffn_residual
        self.ffn = ffn

    def forward(self, x_BTD: Tensor, context: BlockContext) -> tuple[Tensor, Auxiliary | None]:
        """The new stream (B, T, D), and what the per-token part reports (or None)."""
        state = context.state
        if isinstance(state, BlockState):
            context = context.for_layer(state.mixer)
        y_BTD = mix(self.mixer, self.mixer_residual.before(x_BTD, context), context)
        x_BTD = self.mixer_residual.after(x_BTD, y_BTD, context)
        if self.cross_mixer is not None and self.cross_residual is not None:
            if isinstance(state, BlockState):
                context = context.for_layer(state.cross)
            y_BTD = mix(self.cross_mixer, self.cross_residual.before(x_BTD, context), context)
            x_BTD = self.cross_residual.after(x_BTD, y_BTD, context)
        y_BTD, report = compute(self.ffn, self.ffn_residual.before(x_BTD, context), context)
        return self.ffn_residual.after(x_BTD, y_BTD, context), report

    def init_state(self, batch_size: int, max_length: int) -> LayerState:
        """An empty decoding state for sequences of at most ``max_length`` tokens."""
        state = self.mixer.init_state(batch_size, max_length)
        if self.cross_mixer is None:
            return state
        return BlockState(state, self.cross_mixer.init_state(batch_size, max_length))

    def num_active_weights(self) -> int:
        """Weights that one token is multiplied with."""
        cross = 0 if self.cross_mixer is None else self.cross_mixer.num_active_weights()
        return self.mixer.num_active_weights() + cross + self.ffn.num_active_weights()


def mix(mixer: Mixer, x_BTD: Tensor, context: BlockContext) -> Tensor:
    """``mixer(x)``; a mixer that does not know of spread tokens gets all of them."""
    if context.time_mesh is None or mixer.tp_mesh is not None:
        return mixer(x_BTD, context)
    y_BTD = mixer(all_tokens(x_BTD, context), replace(context, time_mesh=None))
    return scatter_to_sequence(y_BTD, context.time_mesh)


def compute(ffn: PerToken, x_BTD: Tensor, context: BlockContext) -> tuple[Tensor, Auxiliary | None]:
    """``ffn(x)``; a part that does not know of spread tokens gets all of them."""
    if context.time_mesh is None or ffn.tp_mesh is not None:
        return ffn(x_BTD, context)
    y_BTD, report = ffn(all_tokens(x_BTD, context), replace(context, time_mesh=None))
    return scatter_to_sequence(y_BTD, context.time_mesh), report


def all_tokens(x_BTD: Tensor, context: BlockContext) -> Tensor:
    """The tokens of all ranks, for a part that every rank computes whole."""
    return gather_from_sequence(x_BTD, context.time_mesh, partial_gradient=False)
