"""TorchScale's configuration classes: the same fields, with the same defaults.

A name that TorchScale does not have is a ``TypeError``, as for every dataclass.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from scalerun.dataclass.errors import ConfigError
from scalerun.models.block_config import BlockConfig

OVERRIDDEN = "0.3.0-override"
"""A configuration of 0.3.0 that ``override`` has changed, as in TorchScale's examples: that version
does not place the norms anew."""
CHOICES = {
    field.name: field.metadata["choices"]
    for field in fields(BlockConfig)
    if field.metadata["choices"] is not None
} | {"activation_fn": ("relu", "gelu", "swish")}
"""The words that a field may be, where it has them."""
VERSIONS = ("main", "0.3.0", OVERRIDDEN)


@dataclass(kw_only=True)
class SharedConfig:
    """The fields that TorchScale's encoder and decoder configurations have in common."""

    activation_fn: str = "gelu"
    dropout: float = 0.0
    drop_path_rate: float = 0.0
    activation_dropout: float = 0.0
    no_scale_embedding: bool = True
    layernorm_embedding: bool = False
    moe_freq: int = 0
    moe_top1_expert: bool = False
    moe_expert_count: int = 0
    moe_gating_use_fp32: bool = True
    moe_eval_capacity_token_fraction: float = 0.25
    moe_second_expert_policy: str = "random"
    moe_normalize_gate_prob_before_dropping: bool = False
    use_xmoe: bool = False
    rel_pos_buckets: int = 0
    max_rel_pos: int = 0
    deepnorm: bool = False
    subln: bool = True
    multiway: bool = False
    no_output_layer: bool = False
    layernorm_eps: float = 1e-5
    vocab_size: int = -1
    checkpoint_activations: bool = False
    fsdp: bool = False
    ddp_rank: int = 0
    xpos_rel_pos: bool = False
    xpos_scale_base: int = 512

    def __post_init__(self) -> None:
        """Settle which of DeepNorm and SubLN holds, and what X-MoE implies, as TorchScale does.

        Raises:
            ConfigError: a field has a value that it cannot have.
        """
        for field in fields(self):
            _check_field(field.name, getattr(self, field.name), field.default)
        if self.deepnorm:
            self.subln = False
        if self.use_xmoe:
            self.moe_normalize_gate_prob_before_dropping = True
            self.moe_second_expert_policy = "random"
            if self.moe_freq <= 0 or self.moe_expert_count <= 0:
                raise ConfigError("use_xmoe needs moe_freq and moe_expert_count above 0")
        for name, reason in (
            ("fsdp", "sharding belongs to the trainer"),
            ("ddp_rank", "ranks belong to the trainer"),
        ):
            if getattr(self, name):
                raise ConfigError(f"TorchScale's {name} is not taken here: {reason}; leave it out")

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Self:
        """The configuration of a mapping, such as one read from a file.

        Raises:
            ConfigError: TorchScale's class has no such field, or not with such a value.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=3)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                raise ConfigError(f"TorchScale's {cls.__name__} has no field {name!r}{hint}")
        return cls(**values)

    def override(self, args: object) -> None:
        """Take over every field that ``args`` has as an attribute and that is not None there."""
        for field in fields(self):
            value = getattr(args, field.name, None)
            if value is not None:
                setattr(self, field.name, value)
        self.__post_init__()


def _check_field(name: str, value: Any, default: Any) -> None:
    """Refuse a value of another type than the field's default, and one that is no choice.

    A whole number is also a float.
    """
    kind = type(default)
    fits = type(value) is kind or (kind is float and type(value) is int)
    if default is not None and not fits:
        article = "an" if kind is int else "a"
        raise ConfigError(f"TorchScale's {name} is {value!r}; give {article} {kind.__name__}")
    if name in CHOICES and value not in CHOICES[name]:
        raise ConfigError(
            f"TorchScale's {name} is {value!r}; give one of {', '.join(CHOICES[name])}"
        )


@dataclass(kw_only=True)
class AttentionFields(SharedConfig):
    """What configurations of attention have beside."""

    attention_dropout: float = 0.0
    bert_init: bool = False
    flash_attention: bool = False
    segment_length: str | list[int] | None = None
    dilated_ratio: str | list[int] | None = None
    seq_parallel: bool = False


@dataclass(kw_only=True)
class EncoderFields:
    """Sizes of an encoder."""

    encoder_embed_dim: int = 768
    encoder_attention_heads: int = 12
    encoder_ffn_embed_dim: int = 3072
    encoder_layers: int = 12
    encoder_normalize_before: bool = True
    normalize_output: bool = True
    max_source_positions: int = 1024
    img_size: int = 224
    patch_size: int = 16
    in_chans: int = 3


@dataclass(kw_only=True)
class DecoderFields:
    """Sizes of a decoder."""

    decoder_embed_dim: int = 768
    decoder_attention_heads: int = 12
    decoder_ffn_embed_dim: int = 3072
    decoder_layers: int = 12
    decoder_normalize_before: bool = True
    share_decoder_input_output_embed: bool = False
    max_target_positions: int = 1024


@dataclass(kw_only=True)
class EncoderConfig(AttentionFields, EncoderFields):
    """``torchscale.architecture.config.EncoderConfig``."""

    share_encoder_input_output_embed: bool = False


@dataclass(kw_only=True)
class DecoderConfig(AttentionFields, DecoderFields):
    """``torchscale.architecture.config.DecoderConfig``."""


@dataclass(kw_only=True)
class EncoderDecoderConfig(AttentionFields, EncoderFields, DecoderFields):
    """``torchscale.architecture.config.EncoderDecoderConfig``."""

    share_all_embeddings: bool = False


AnyConfig = TypeVar("AnyConfig", bound=SharedConfig)


def as_config(
    kind: type[AnyConfig], given: AnyConfig | Mapping[str, Any], version: str
) -> AnyConfig:
    """A configuration from itself or from its fields.

    Raises:
        ConfigError: a field or the version is not known, or the version has no such field.
    """
    if version not in VERSIONS:
        choices = ", ".join(VERSIONS)
        raise ConfigError(f"TorchScale version {version!r} is not known (choices: {choices})")
    cfg = kind.from_fields(given) if isinstance(given, Mapping) else given
    if version != "main" and isinstance(cfg, AttentionFields) and cfg.segment_length:
        raise ConfigError("TorchScale 0.3.0 has no segment_length; it came with version main")
    return cfg
