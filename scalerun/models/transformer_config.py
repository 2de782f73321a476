"""The settings of a transformer decoder."""

from __future__ import annotations

from dataclasses import dataclass

from scalerun.models.attention_config import AttentionConfig
from scalerun.models.sides import DecoderSide, check_norm_placement
from scalerun.models.stack import Axes, Stack
from scalerun.modules.residual import deepnorm_alpha, deepnorm_gain, subln_gain


@dataclass
class TransformerConfig(AttentionConfig, DecoderSide):
    """Settings of a decoder; TorchScale's names and, where it trains well, its defaults."""

    free_settings = AttentionConfig.free_settings | {"max_target_positions"}

    def validate(self) -> None:
        super().validate()
        check_norm_placement(self, self.decoder_normalize_before, "decoder")

    def stacks(self) -> list[Stack]:
        return [self.decoder_stack()]

    def decoder_stack(self) -> Stack:
        """The one stack of the model."""
        layers = self.decoder_layers
        axes = self.axes_for(
            normalize_before=self.decoder_normalize_before,
            learned=self.decoder_learned_pos,
            alpha=deepnorm_alpha(layers) if layers > 0 else 1.0,
            gain=(deepnorm_gain if self.deepnorm else subln_gain)(max(layers, 1)),
        )
        return Stack(
            side="decoder",
            axes=axes,
            dim=self.decoder_embed_dim,
            ffn_dim=self.decoder_ffn_embed_dim,
            num_layers=layers,
            num_heads=self.decoder_attention_heads,
            max_positions=self.max_target_positions,
            tied_output=self.share_decoder_input_output_embed,
            final_norm=axes.residual == "pre_norm",
        )

    def axes(self) -> Axes:
        """The parts that these settings choose."""
        return self.decoder_stack().axes
