"""From TorchScale's configurations to scalerun's."""

from __future__ import annotations

from typing import Any

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.flags import check_settings
from scalerun.dataclass.literals import SettingType
from scalerun.models.attention_config import XPOS_BASE
from scalerun.models.beit3 import BEiT3Config
from scalerun.models.torchscale.configs import (
    OVERRIDDEN,
    AttentionFields,
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
)
from scalerun.models.torchscale.moe import moe_settings
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_encoder import TransformerEncoderConfig
from scalerun.models.transformer_mlm import TransformerMLMConfig
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
IMAGE = ("img_size", "patch_size", "in_chans")
"""Fields that mean the same here."""
LISTS = ("segment_length", "dilated_ratio")
KEPT = {"keep_norm_placement": True}


def encoder_config(
    given: EncoderConfig, *, version: str, **positions: Any
) -> TransformerEncoderConfig:
    """An encoder's settings.

    Args:
        version: one of :data:`VERSIONS`.
        positions: settings of absolute positions, which TorchScale takes as modules.

    Raises:
        ConfigError: a setting is out of range or has no form here.
    """
    cfg = TransformerEncoderConfig(
        **_settings(given, ENCODER, ("encoder",), version, positions),
        multiway=given.multiway,
        share_encoder_input_output_embed=given.share_encoder_input_output_embed,
        no_output_layer=given.no_output_layer,
    )
    check_settings(cfg)
    return cfg


def mlm_config(given: EncoderConfig, *, version: str, **positions: Any) -> TransformerMLMConfig:
    """A masked language model's settings; arguments and errors as in :func:`encoder_config`."""
    cfg = TransformerMLMConfig(
        **_settings(given, ENCODER, ("encoder",), version, positions), multiway=given.multiway
    )
    check_settings(cfg)
    return cfg


def beit3_config(given: EncoderConfig, *, version: str, **positions: Any) -> BEiT3Config:
    """BEiT-3's settings; arguments and errors as in :func:`encoder_config`."""
    cfg = BEiT3Config(
        **_settings(given, ENCODER + IMAGE, ("encoder",), version, positions),
        no_output_layer=given.no_output_layer,
    )
    check_settings(cfg)
    return cfg


def decoder_config(given: DecoderConfig, *, version: str, **positions: Any) -> TransformerConfig:
    """A decoder's settings; arguments and errors as in :func:`encoder_config`."""
    if given.no_output_layer:
        raise ConfigError("TorchScale's no_output_layer has no form for a decoder; leave it out")
    cfg = TransformerConfig(**_settings(given, DECODER, ("decoder",), version, positions))
    check_settings(cfg)
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
        **_settings(given, ENCODER + DECODER, ("encoder", "decoder"), version, positions),
        share_all_embeddings=given.share_all_embeddings,
    )
    check_settings(cfg)
    return cfg


def _settings(
    given: AttentionFields,
    own: tuple[str, ...],
    sides: tuple[str, ...],
    version: str,
    positions: dict[str, Any],
) -> dict[str, Any]:
    """What all kinds of models have in common, and the fields ``own`` of this kind."""
    copied = {name: getattr(given, name) for name in SHARED + own}
    copied |= {name: _numbers(name, copied[name]) for name in LISTS}
    if "encoder" in sides:
        # main, the version with LongNet, counts what fills up an encoder's last segment.
        copied["encoder_zero_keys"] = version == "main" and bool(given.segment_length)
    # TorchScale ignores these; here a setting without effect is refused.
    if not copied["xpos_rel_pos"]:
        copied["xpos_scale_base"] = XPOS_BASE
    if given.rel_pos_buckets <= 0 or given.max_rel_pos <= 0:
        copied |= {"rel_pos_buckets": 0, "max_rel_pos": 0}
    return copied | positions | _options(given) | _placed_norms(given, sides, version)


def _placed_norms(given: AttentionFields, sides: tuple[str, ...], version: str) -> dict[str, Any]:
    """Where that version of TorchScale puts the norms.

    DeepNorm and SubLN place an encoder's norms in both versions. In ``main`` a decoder keeps its
    own ``decoder_normalize_before``, so that DeepNorm is pre-norm unless that is switched off.
    """
    placed = {side: bool(getattr(given, f"{side}_normalize_before")) for side in sides}
    usual = not given.deepnorm
    if given.deepnorm or given.subln:
        forced = {"main": ("encoder",), "0.3.0": ("encoder", "decoder"), OVERRIDDEN: ()}[version]
        placed |= {side: usual for side in sides if side in forced}
        if all(before == usual for before in placed.values()):
            return {}
    kept = KEPT if given.deepnorm or given.subln else {}
    return {f"{side}_normalize_before": before for side, before in placed.items()} | kept


def _numbers(name: str, value: str | list[int] | None) -> list[int]:
    """A list that TorchScale may have as text."""
    if value is None or isinstance(value, list):
        return value or []
    if not isinstance(value, str):
        raise ConfigError(f"TorchScale's {name} is {value!r}; give a list of whole numbers")
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
