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
        layers = max(self.decoder_layers, 1)
        return decoder_stack(
            self,
            self,
            alpha=deepnorm_alpha(layers),
            gain=(deepnorm_gain if self.deepnorm else subln_gain)(layers),
            tied_output=self.share_decoder_input_output_embed,
        )

    def axes(self) -> Axes:
        """The parts that these settings choose."""
        return self.decoder_stack().axes


def decoder_stack(
    cfg: AttentionConfig,
    side: DecoderSide,
    *,
    alpha: float,
    gain: float,
    tied_output: bool,
    cross_attention: bool = False,
) -> Stack:
    """The stack that a decoder's settings describe."""
    axes = cfg.axes_for(
        normalize_before=side.decoder_normalize_before,
        learned=side.decoder_learned_pos,
        alpha=alpha,
        gain=gain,
    )
    return Stack(
        side="decoder",
        axes=axes,
        dim=side.decoder_embed_dim,
        ffn_dim=side.decoder_ffn_embed_dim,
        num_layers=side.decoder_layers,
        num_heads=side.decoder_attention_heads,
        max_positions=side.max_target_positions,
        tied_output=tied_output,
        final_norm=axes.residual == "pre_norm",
        cross_attention=cross_attention,
    )
