"""TorchScale's RetNet: its configuration, its state-dict keys, and models from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.flags import check_settings
from scalerun.models.renames import Renames
from scalerun.models.retnet import MODEL, RetNetLM
from scalerun.models.retnet import RetNetConfig as OurConfig
from scalerun.models.torchscale.configs import OVERRIDDEN, SharedConfig, as_config
from scalerun.models.torchscale.moe import GATE_RENAMES, moe_settings, stack_experts
from scalerun.models.translation import Translation, drop_tied
from scalerun.modules.init import initialize
from scalerun.modules.retention_decay import angles, log_decays

VERSION = "0.3.0"
"""DeepNorm and SubLN place the norms as their papers say."""

NORM_EPS_MODES = {
    "main": "torchscale",
    "0.3.0": "torchscale_0.3.0",
    OVERRIDDEN: "torchscale_0.3.0",
}
"""Denominators of retention by version of TorchScale."""

SAME = (
    "activation_fn",
    "dropout",
    "drop_path_rate",
    "activation_dropout",
    "no_scale_embedding",
    "layernorm_embedding",
    "layernorm_eps",
    "deepnorm",
    "checkpoint_activations",
    "decoder_embed_dim",
    "decoder_value_embed_dim",
    "decoder_retention_heads",
    "decoder_ffn_embed_dim",
    "decoder_layers",
    "share_decoder_input_output_embed",
    "max_target_positions",
    "chunkwise_recurrent",
)
"""Fields that mean the same here."""

RENAMES = Renames(
    (
        ("embed_tokens.weight", "embedding.tokens.weight"),
        ("layernorm_embedding.weight", "embedding.norm.weight"),
        ("layer_norm.weight", "final_norm.weight"),
        ("output_projection.weight", "output_projection.weight"),
        (
            "layers.{layer}.retention.{qkvgo}_proj.weight",
            "layers.{layer}.mixer.{qkvgo}_proj.weight",
        ),
        ("layers.{layer}.retention_layer_norm.weight", "layers.{layer}.mixer_residual.norm.weight"),
        ("layers.{layer}.ffn.{fcg}.weight", "layers.{layer}.ffn.{fcg}.weight"),
        ("layers.{layer}.final_layer_norm.weight", "layers.{layer}.ffn_residual.norm.weight"),
        *GATE_RENAMES,
    )
)

TABLES: dict[str, Callable[[int], Tensor]] = {
    "retnet_rel_pos.angle": lambda numel: angles(numel).repeat_interleave(2),
    "retnet_rel_pos.decay": log_decays,
}
"""Stored tables that we compute, by the number of their entries."""


@dataclass(kw_only=True)
class RetNetConfig(SharedConfig):
    """``torchscale.architecture.config.RetNetConfig``, whose default sizes do not fit together."""

    layernorm_eps: float = 1e-6
    decoder_embed_dim: int = 768
    decoder_value_embed_dim: int = 1280
    decoder_retention_heads: int = 3
    decoder_ffn_embed_dim: int = 1280
    decoder_layers: int = 12
    decoder_normalize_before: bool = True
    share_decoder_input_output_embed: bool = False
    max_target_positions: int = 1024
    chunkwise_recurrent: bool = False
    recurrent_chunk_size: int = 512


def retnet_config(given: RetNetConfig, *, version: str) -> OurConfig:
    """A RetNet's settings.

    Args:
        version: one of :data:`VERSIONS`. They differ in the denominators of retention, and in
            whether DeepNorm moves the norms: only in ``0.3.0``; elsewhere it is pre-norm unless
            ``decoder_normalize_before`` is switched off.

    Raises:
        ConfigError: sizes do not fit together, or a setting has no form here.
    """
    for name in ("multiway", "no_output_layer"):
        if getattr(given, name):
            raise ConfigError(f"TorchScale's {name} has no form for a RetNet; leave it out")
    settings = {name: getattr(given, name) for name in SAME} | moe_settings(given)
    settings["subln"] = given.subln and "moe_freq" in settings
    if given.chunkwise_recurrent:
        settings["recurrent_chunk_size"] = given.recurrent_chunk_size
    before = bool(given.decoder_normalize_before)
    if version == "0.3.0" and (given.deepnorm or given.subln):
        before = not given.deepnorm
    if not given.deepnorm:
        settings["decoder_normalize_before"] = before
    elif before:
        settings["keep_norm_placement"] = True
    cfg = OurConfig(**settings, init="torchscale", norm_eps_mode=NORM_EPS_MODES[version])
    check_settings(cfg)
    return cfg


def RetNet(cfg: RetNetConfig, *, padding_idx: int | None = None, seed: int = 1) -> RetNetLM:
    """A RetNet with fresh weights, drawn as TorchScale draws them.

    Args:
        cfg: TorchScale's configuration; ``vocab_size`` has to be set.
        padding_idx: number of the padding symbol.
        seed: decides all weights.

    Raises:
        ConfigError: a setting is out of range or has no form here.
    """
    if cfg.vocab_size <= 0:
        raise ConfigError(f"vocab_size is {cfg.vocab_size}; give the number of symbols")
    model = _on_meta(retnet_config(cfg, version=VERSION), cfg.vocab_size, padding_idx)
    model.to_empty(device="cpu")
    initialize(model, seed)
    return model


def load_retnet(
    given: RetNetConfig | Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    version: str,
    padding_idx: int | None = None,
) -> RetNetLM:
    """A RetNet on the CPU, in float32, with TorchScale's weights and its denominators.

    Args:
        given: TorchScale's configuration, or what was passed to it.
        state: the decoder's state dict, its keys without prefix.
        version: as in :func:`~scalerun.models.torchscale.loader.load_encoder`.
        padding_idx: number of the padding symbol.

    Raises:
        ConfigError: the configuration chooses something that is not there.
        UserError: keys or shapes do not fit the configuration.
    """
    model: RetNetLM = translate_retnet(given, state, version=version).build(padding_idx)
    return model


def translate_retnet(
    given: RetNetConfig | Mapping[str, Any], state: Mapping[str, Tensor], *, version: str
) -> Translation:
    """What :func:`load_retnet` builds."""
    cfg = retnet_config(as_config(RetNetConfig, given, version), version=version)
    weights = convert_retnet_keys(state)
    embedding = weights.get("embedding.tokens.weight")
    if embedding is None:
        raise UserError("the state dict has no embed_tokens.weight")
    if cfg.share_decoder_input_output_embed:
        drop_tied(weights, "output_projection.weight", "embedding.tokens.weight")
    return Translation(MODEL, cfg, weights, embedding.shape[0])


def convert_retnet_keys(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under our names; tables that we compute are dropped.

    Raises:
        UserError: a key is not one of a RetNet's, or a stored table has other values.
    """
    rest, converted = stack_experts(state)
    for key, tensor in rest.items():
        if re.fullmatch(r"layers\.\d+\.retention\.q_proj\.bias", key):
            raise UserError(
                f"the state dict has {key}: it is of a RetNet from before September 2023, with "
                "biases and LayerNorm, which is another architecture; train a new one"
            )
        if key in TABLES:
            _check_table(key, tensor)
        else:
            name = RENAMES.ours(key)
            if name is None:
                raise UserError(f"the state dict has {key}, which no TorchScale RetNet has")
            converted[name] = tensor
    return converted


def _on_meta(cfg: OurConfig, vocab_size: int, padding_idx: int | None) -> RetNetLM:
    with torch.device("meta"):
        return RetNetLM.build_model(cfg, vocab_size=vocab_size, padding_idx=padding_idx)


def _check_table(key: str, table: Tensor) -> None:
    ours = TABLES[key](table.numel())
    # The tolerance admits tables that were stored in half precision.
    if not torch.allclose(table.float().flatten(), ours, rtol=5e-3, atol=1e-7):
        raise UserError(f"the state dict's {key} is not the table of a RetNet")
