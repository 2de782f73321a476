"""The block that every architecture is a stack of. B batch, T time, D model width."""

from __future__ import annotations

from torch import Tensor, nn

from scalerun.modules.feed_forward import PerToken
from scalerun.modules.incremental_state import LayerState
from scalerun.modules.mixer import BlockContext, Mixer
from scalerun.modules.residual import Residual


class TransformerBlock(nn.Module):
    """Two residual branches: mix tokens, then compute per token."""

    def __init__(
        self, mixer: Mixer, ffn: PerToken, *, mixer_residual: Residual, ffn_residual: Residual
    ) -> None:
        super().__init__()
        self.mixer_residual = mixer_residual
        self.mixer = mixer
        self.ffn_residual = ffn_residual
        self.ffn = ffn

    def forward(self, x_BTD: Tensor, context: BlockContext) -> tuple[Tensor, Tensor | None]:
        """The new stream (B, T, D), and the auxiliary loss of the per-token part (or None)."""
        y_BTD = self.mixer(self.mixer_residual.before(x_BTD), context)
        x_BTD = self.mixer_residual.after(x_BTD, y_BTD)
        y_BTD, aux_loss = self.ffn(self.ffn_residual.before(x_BTD))
        return self.ffn_residual.after(x_BTD, y_BTD), aux_loss

    def init_state(self, batch_size: int, max_length: int) -> LayerState:
        """An empty decoding state for sequences of at most ``max_length`` tokens."""
        return self.mixer.init_state(batch_size, max_length)

    def num_active_weights(self) -> int:
        """Weights that one token is multiplied with."""
        return self.mixer.num_active_weights() + self.ffn.num_active_weights()
