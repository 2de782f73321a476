"""The encoder-decoder for translation, and its presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.models.attention_config import AttentionConfig
from scalerun.models.base_model import register_model, register_model_architecture
from scalerun.models.encoder_decoder import EncoderDecoder
from scalerun.models.sides import DecoderSide, EncoderSide, check_norm_placement
from scalerun.models.stack import Stack
from scalerun.models.transformer_config import decoder_stack
from scalerun.models.transformer_encoder import encoder_stack
from scalerun.modules.residual import (
    deepnorm_decoder_alpha,
    deepnorm_decoder_gain,
    deepnorm_encoder_alpha,
    deepnorm_encoder_gain,
    subln_decoder_gain,
    subln_encoder_gain,
)

MODEL = "transformer_mt"


@dataclass
class TransformerMTConfig(AttentionConfig, EncoderSide, DecoderSide):
    """Settings of an encoder-decoder; names and meanings are TorchScale's."""

    free_settings = AttentionConfig.free_settings | {
        "max_source_positions",
        "max_target_positions",
    }

    implied: ClassVar[Mapping[str, str]] = {"task": "translation"}

    share_all_embeddings: bool = option(
        False, "one token embedding for encoder, decoder and output projection"
    )

    def validate(self) -> None:
        super().validate()
        check_norm_placement(self, self.encoder_normalize_before, "encoder")
        check_norm_placement(self, self.decoder_normalize_before, "decoder")
        if self.encoder_embed_dim != self.decoder_embed_dim:
            raise ConfigError(
                f"--encoder-embed-dim {self.encoder_embed_dim} and --decoder-embed-dim "
                f"{self.decoder_embed_dim} differ; cross-attention needs one width"
            )

    def stacks(self) -> list[Stack]:
        return [self.encoder_stack(), self.decoder_stack()]

    def encoder_stack(self) -> Stack:
        """The stack that reads the source."""
        depths = max(self.encoder_layers, 1), max(self.decoder_layers, 1)
        gain = deepnorm_encoder_gain if self.deepnorm else subln_encoder_gain
        return encoder_stack(self, self, alpha=deepnorm_encoder_alpha(*depths), gain=gain(*depths))

    def decoder_stack(self) -> Stack:
        """The stack that predicts the target."""
        depth = max(self.decoder_layers, 1)
        return decoder_stack(
            self,
            self,
            alpha=deepnorm_decoder_alpha(depth),
            gain=(deepnorm_decoder_gain if self.deepnorm else subln_decoder_gain)(depth),
            tied_output=self.share_all_embeddings or self.share_decoder_input_output_embed,
            cross_attention=True,
        )


@register_model(MODEL, TransformerMTConfig)
class TransformerMT(EncoderDecoder):
    """A transformer that translates one sequence into another."""


@register_model_architecture(MODEL, "mt_base")
def mt_base() -> TransformerMTConfig:
    """The base encoder-decoder of TorchScale's translation example."""
    return TransformerMTConfig(
        encoder_embed_dim=512,
        encoder_attention_heads=8,
        encoder_ffn_embed_dim=2048,
        encoder_layers=6,
        encoder_normalize_before=False,
        decoder_embed_dim=512,
        decoder_attention_heads=8,
        decoder_ffn_embed_dim=2048,
        decoder_layers=6,
        decoder_normalize_before=False,
        activation_fn="relu",
        dropout=0.1,
        no_scale_embedding=False,
    )


@register_model_architecture(MODEL, "mt_tied_base")
def mt_tied_base() -> TransformerMTConfig:
    """``mt_base`` as TorchScale's documented command trains it: dropout 0.3, a tied decoder."""
    return mt_base().replace(dropout=0.3, share_decoder_input_output_embed=True)


@register_model_architecture(MODEL, "mt_tiny")
def mt_tiny() -> TransformerMTConfig:
    """About the size of ``lm_tiny`` on each side."""
    return TransformerMTConfig(
        encoder_embed_dim=128,
        encoder_attention_heads=4,
        encoder_ffn_embed_dim=512,
        encoder_layers=2,
        decoder_embed_dim=128,
        decoder_attention_heads=4,
        decoder_ffn_embed_dim=512,
        decoder_layers=2,
        share_all_embeddings=True,
    )
