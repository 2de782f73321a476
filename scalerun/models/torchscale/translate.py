"""From TorchScale's configurations to scalerun's."""

from __future__ import annotations

from typing import Any

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.literals import SettingType
from scalerun.models.torchscale.configs import (
    AttentionFields,
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
)
from scalerun.models.torchscale.moe import moe_settings
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
    "segment_length",
    "dilated_ratio",
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
LISTS = ("segment_length", "dilated_ratio")
KEPT = {"keep_norm_placement": True}


def encoder_config(
    given: EncoderConfig, *, version: str, **positions: Any
) -> TransformerEncoderConfig:
    """An encoder's settings.

    Args:
        version: ``main`` or ``0.3.0``.
        positions: settings of absolute positions, which TorchScale takes as modules.

    Raises:
        ConfigError: a setting is out of range or has no form here.
    """
    cfg = TransformerEncoderConfig(
        **(_copied(given, SHARED + ENCODER) | positions),
        **_options(given),
        **_placed_norms(given, ("encoder",), version),
        **_zero_keys(given, version),
        multiway=given.multiway,
        share_encoder_input_output_embed=given.share_encoder_input_output_embed,
        no_output_layer=given.no_output_layer,
    )
    cfg.validate()
    return cfg


def decoder_config(given: DecoderConfig, *, version: str, **positions: Any) -> TransformerConfig:
    """A decoder's settings; arguments and errors as in :func:`encoder_config`."""
    if given.no_output_layer:
        raise ConfigError("TorchScale's no_output_layer has no form for a decoder; leave it out")
    cfg = TransformerConfig(
        **(_copied(given, SHARED + DECODER) | positions),
        **_options(given),
        **_placed_norms(given, ("decoder",), version),
    )
    cfg.validate()
    return cfg


def encoder_decoder_config(
    given: EncoderDecoderConfig, *, version: str, **positions: Any
) -> TransformerMTConfig:
    """An encoder-decoder's settings; arguments and errors as in :func:`encoder_config`."""
    if given.no_output_layer or given.multiway:
        raise ConfigError(
            "TorchScale's no_output_layer and multiway have no form for an encoder-decoder; leave "
            "them out"
        )
    cfg = TransformerMTConfig(
        **(_copied(given, SHARED + ENCODER + DECODER) | positions),
        **_options(given),
        **_placed_norms(given, ("encoder", "decoder"), version),
        **_zero_keys(given, version),
        share_all_embeddings=given.share_all_embeddings,
    )
    cfg.validate()
    return cfg


def _placed_norms(given: AttentionFields, sides: tuple[str, ...], version: str) -> dict[str, Any]:
    """Where that version of TorchScale puts the norms.

    An encoder's follow DeepNorm and SubLN in both versions. In ``main`` a decoder keeps its own
    ``decoder_normalize_before``, so that DeepNorm is pre-norm unless that is switched off.
    """
    asked = {side: bool(getattr(given, f"{side}_normalize_before")) for side in sides}
    if given.deepnorm or given.subln:
        usual = not given.deepnorm
        kept = asked.get("decoder", usual) if version == "main" else usual
        if kept == usual:
            return {}
        asked |= {"encoder": usual} if "encoder" in sides else {}
        return {f"{side}_normalize_before": asked[side] for side in sides} | KEPT
    return {f"{side}_normalize_before": before for side, before in asked.items()}


def _zero_keys(given: AttentionFields, version: str) -> dict[str, Any]:
    """``main``, the version with LongNet, counts what fills up an encoder's last segment."""
    return {"encoder_zero_keys": version == "main" and bool(given.segment_length)}


def _copied(given: Any, names: tuple[str, ...]) -> dict[str, Any]:
    copied = {name: getattr(given, name) for name in names}
    return copied | {name: _numbers(name, copied[name]) for name in LISTS}


def _numbers(name: str, value: str | list[int] | None) -> list[int]:
    """A list that TorchScale may have as text."""
    if not isinstance(value, str):
        return list(value or ())
    try:
        numbers: list[int] = SettingType(int, list).parse(value)
    except ValueError as error:
        raise ConfigError(f"TorchScale's {name} is {value!r}: {error}") from None
    return numbers


def _options(given: AttentionFields) -> dict[str, Any]:
    """Settings whose name or form differs, and refusal of what there is no form for."""
    if given.seq_parallel:
        raise ConfigError("TorchScale's seq_parallel belongs to the trainer; leave it out")
    return {"init": "bert" if given.bert_init else "torchscale", **moe_settings(given)}
