"""From TorchScale's configurations to scalerun's, and to the stacks that they describe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scalerun.dataclass.errors import ConfigError
from scalerun.models.stack import Stack
from scalerun.models.torchscale.configs import (
    AttentionFields,
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    EncoderFields,
)
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_encoder import TransformerEncoderConfig
from scalerun.models.transformer_mt import TransformerMTConfig

SHARED = (
    "activation_fn",
    "dropout",
    "drop_path_rate",
    "attention_dropout",
    "activation_dropout",
    "no_scale_embedding",
    "layernorm_embedding",
    "layernorm_eps",
    "rel_pos_buckets",
    "max_rel_pos",
    "deepnorm",
    "subln",
    "checkpoint_activations",
    "xpos_rel_pos",
    "xpos_scale_base",
)
ENCODER = (
    "encoder_embed_dim",
    "encoder_attention_heads",
    "encoder_ffn_embed_dim",
    "encoder_layers",
    "normalize_output",
    "max_source_positions",
)
DECODER = (
    "decoder_embed_dim",
    "decoder_attention_heads",
    "decoder_ffn_embed_dim",
    "decoder_layers",
    "share_decoder_input_output_embed",
    "max_target_positions",
)
"""Fields that mean the same here."""


def encoder_config(given: EncoderConfig) -> TransformerEncoderConfig:
    """An encoder's settings, without where its norms sit."""
    cfg = TransformerEncoderConfig(
        **_copied(given, SHARED + ENCODER),
        **_options(given),
        multiway=given.multiway,
        share_encoder_input_output_embed=given.share_encoder_input_output_embed,
        no_output_layer=given.no_output_layer,
    )
    cfg.validate()
    return cfg


def decoder_config(given: DecoderConfig) -> TransformerConfig:
    """A decoder's settings, without where its norms sit."""
    if given.no_output_layer:
        raise ConfigError("TorchScale's no_output_layer has no form for a decoder; leave it out")
    cfg = TransformerConfig(**_copied(given, SHARED + DECODER), **_options(given))
    cfg.validate()
    return cfg


def encoder_decoder_config(given: EncoderDecoderConfig) -> TransformerMTConfig:
    """An encoder-decoder's settings, without where its norms sit."""
    if given.no_output_layer or given.multiway:
        raise ConfigError(
            "TorchScale's no_output_layer and multiway have no form for an encoder-decoder; leave "
            "them out"
        )
    cfg = TransformerMTConfig(
        **_copied(given, SHARED + ENCODER + DECODER),
        **_options(given),
        share_all_embeddings=given.share_all_embeddings,
    )
    cfg.validate()
    return cfg


def place_norms(stack: Stack, given: AttentionFields, *, version: str) -> Stack:
    """The stack with its norms where that version of TorchScale puts them.

    An encoder's follow DeepNorm and SubLN in both versions. In ``main`` a decoder keeps its own
    ``decoder_normalize_before``, so that DeepNorm is pre-norm unless that is switched off.
    """
    before = bool(getattr(given, f"{stack.side}_normalize_before"))
    if (given.deepnorm or given.subln) and (version == "0.3.0" or stack.side == "encoder"):
        before = not given.deepnorm
    after = "deep_norm" if given.deepnorm else "post_norm"
    axes = replace(stack.axes, residual="pre_norm" if before else after)
    # A decoder always has the last norm; an encoder may do without.
    wanted = given.normalize_output if isinstance(given, EncoderFields) else True
    return replace(stack, axes=axes, final_norm=before and (wanted or stack.side == "decoder"))


def _copied(given: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(given, name) for name in names}


def _options(given: AttentionFields) -> dict[str, Any]:
    """Settings whose name or form differs, and refusal of what there is no form for."""
    if given.moe_freq:
        raise ConfigError(f"TorchScale's moe_freq={given.moe_freq} is not a dense model")
    if given.segment_length or given.dilated_ratio:
        raise ConfigError("TorchScale's segment_length is not plain attention")
    if given.seq_parallel:
        raise ConfigError("TorchScale's seq_parallel belongs to the trainer; leave it out")
    return {"init": "bert" if given.bert_init else "torchscale"}
