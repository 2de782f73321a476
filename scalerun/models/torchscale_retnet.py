"""TorchScale's RetNet configuration and state-dict keys, translated.

Anything else than a dense RetNet is refused rather than guessed. Tensors are handed in: reading a
file is the caller's business.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models.retnet import RetNetConfig, RetNetLM, RetNetParts
from scalerun.models.stack import Stack
from scalerun.models.torchscale_state import check_fit, drop_tied
from scalerun.modules.retention_decay import angles, log_decays

NORM_EPS_MODES = {"main": "torchscale", "0.3.0": "torchscale_0.3.0"}
"""Denominators of retention by version of TorchScale."""

SAME_MEANING: dict[str, Any] = {
    "decoder_embed_dim": 768,
    "decoder_value_embed_dim": 1280,
    "decoder_retention_heads": 3,
    "decoder_ffn_embed_dim": 1280,
    "decoder_layers": 12,
    "activation_fn": "gelu",
    "dropout": 0.0,
    "drop_path_rate": 0.0,
    "activation_dropout": 0.0,
    "no_scale_embedding": True,
    "layernorm_embedding": False,
    "share_decoder_input_output_embed": False,
    "max_target_positions": 1024,
    "layernorm_eps": 1e-6,
    "chunkwise_recurrent": False,
    "checkpoint_activations": False,
}
"""Fields copied as they are, with TorchScale's defaults."""

CHUNK_SIZE = 512
"""TorchScale's ``recurrent_chunk_size``, which counts with ``chunkwise_recurrent`` alone."""

NORM_FIELDS: dict[str, bool] = {
    "decoder_normalize_before": True,
    "deepnorm": False,
    "subln": True,
}

REFUSED: dict[str, tuple[Any, ...]] = {
    "moe_freq": (0,),
    "use_xmoe": (False,),
    "multiway": (False,),
    "no_output_layer": (False,),
}
"""Fields with another architecture behind them, and the values that leave it switched off."""

WITHOUT_EFFECT = frozenset(
    {
        "ddp_rank",
        "fsdp",
        "max_rel_pos",
        "moe_eval_capacity_token_fraction",
        "moe_expert_count",
        "moe_gating_use_fp32",
        "moe_normalize_gate_prob_before_dropping",
        "moe_second_expert_policy",
        "moe_top1_expert",
        "rel_pos_buckets",
        "vocab_size",
        "xpos_rel_pos",
        "xpos_scale_base",
    }
)
"""Fields that do not change what a dense RetNet computes once its weights are loaded."""

RENAMES = (
    (r"embed_tokens\.weight", r"embedding.tokens.weight"),
    (r"layernorm_embedding\.weight", r"embedding.norm.weight"),
    (r"layer_norm\.weight", r"final_norm.weight"),
    (r"output_projection\.weight", r"output_projection.weight"),
    (r"layers\.(\d+)\.retention\.([qkvg]|out)_proj\.weight", r"layers.\1.mixer.\2_proj.weight"),
    (r"layers\.(\d+)\.retention_layer_norm\.weight", r"layers.\1.mixer_residual.norm.weight"),
    (r"layers\.(\d+)\.ffn\.(fc1|gate|fc2)\.weight", r"layers.\1.ffn.\2.weight"),
    (r"layers\.(\d+)\.final_layer_norm\.weight", r"layers.\1.ffn_residual.norm.weight"),
)

TABLES: dict[str, Callable[[int], Tensor]] = {
    "retnet_rel_pos.angle": lambda numel: angles(numel).repeat_interleave(2),
    "retnet_rel_pos.decay": log_decays,
}
"""Stored tables that we compute, by the number of their entries."""


def convert_config(fields: Mapping[str, Any], *, version: str) -> tuple[RetNetConfig, Stack]:
    """The configuration and the parts that TorchScale builds from a ``RetNetConfig``.

    Args:
        fields: what was passed to ``RetNetConfig``; what is left out has TorchScale's default.
        version: ``main`` or ``0.3.0``. They differ in the denominators of retention, and in whether
            DeepNorm moves the norms: in ``main`` it is pre-norm unless
            ``decoder_normalize_before`` is switched off.

    Raises:
        ConfigError: a field is unknown, sizes do not fit, or another architecture is chosen.
    """
    if version not in NORM_EPS_MODES:
        raise ConfigError(f"TorchScale version {version!r} is not known (choices: main, 0.3.0)")
    for name, value in fields.items():
        if name in REFUSED and value not in REFUSED[name]:
            raise ConfigError(f"TorchScale's {name}={value!r} is not a plain dense RetNet")
        known = {*SAME_MEANING, *NORM_FIELDS, *REFUSED, *WITHOUT_EFFECT, "recurrent_chunk_size"}
        if name not in known:
            raise ConfigError(f"TorchScale's RetNetConfig has no field {name!r}")
    settings = {name: fields.get(name, default) for name, default in SAME_MEANING.items()}
    if settings["chunkwise_recurrent"]:
        settings["recurrent_chunk_size"] = fields.get("recurrent_chunk_size", CHUNK_SIZE)
    norm = {name: bool(fields.get(name, default)) for name, default in NORM_FIELDS.items()}
    deepnorm = norm["deepnorm"]
    before = norm["decoder_normalize_before"]
    if version == "0.3.0" and (deepnorm or norm["subln"]):
        before = not deepnorm
    cfg = RetNetConfig(
        **settings, deepnorm=deepnorm, init="torchscale", norm_eps_mode=NORM_EPS_MODES[version]
    )
    cfg.validate()
    moved = "pre_norm" if before else "deep_norm" if deepnorm else "post_norm"
    stack = cfg.decoder_stack()
    return cfg, replace(
        stack, axes=replace(stack.axes, residual=moved), final_norm=moved == "pre_norm"
    )


def convert_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under our names; tables that we compute are dropped.

    Raises:
        UserError: a key is not one of a dense RetNet's, or a stored table has other values.
    """
    converted: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if re.fullmatch(r"layers\.\d+\.retention\.q_proj\.bias", key):
            raise UserError(
                f"the state dict has {key}: it is of a RetNet from before September 2023, with "
                "biases and LayerNorm, which is another architecture; train a new one"
            )
        if key in TABLES:
            _check_table(key, tensor)
            continue
        for pattern, name in RENAMES:
            match = re.fullmatch(pattern, key)
            if match:
                converted[match.expand(name)] = tensor
                break
        else:
            raise UserError(f"the state dict has {key}, which no dense TorchScale RetNet has")
    return converted


def load_retnet(
    fields: Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    version: str,
    padding_idx: int | None = None,
) -> RetNetLM:
    """A RetNet on the CPU, in float32, with TorchScale's weights and its denominators.

    Args:
        fields: what was passed to ``RetNetConfig``; see :func:`convert_config`.
        state: the decoder's state dict, its keys without prefix.
        version: which TorchScale trained it: ``main`` or ``0.3.0``.
        padding_idx: number of the padding symbol.

    Raises:
        ConfigError: the configuration is not one of a dense RetNet.
        UserError: keys or shapes do not fit the configuration.
    """
    cfg, stack = convert_config(fields, version=version)
    weights = convert_state_dict(state)
    if "embedding.tokens.weight" not in weights:
        raise UserError("the state dict has no embed_tokens.weight")
    if cfg.share_decoder_input_output_embed:
        drop_tied(weights)
    vocab_size = weights["embedding.tokens.weight"].shape[0]
    with torch.device("meta"):
        model = RetNetLM(RetNetParts(cfg, stack, vocab_size=vocab_size, padding_idx=padding_idx))
    model.to_empty(device="cpu")
    check_fit(model.state_dict(), weights)
    model.load_state_dict(weights)
    return model


def _check_table(key: str, table: Tensor) -> None:
    ours = TABLES[key](table.numel())
    # The tolerance admits tables that were stored in half precision.
    if not torch.allclose(table.float().flatten(), ours, rtol=5e-3, atol=1e-7):
        raise UserError(f"the state dict's {key} is not the table of a RetNet")
