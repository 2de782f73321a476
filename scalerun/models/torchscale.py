"""TorchScale's decoder configuration and state-dict keys, translated.

Only dense decoders; anything else is refused rather than guessed. Tensors are handed in: reading a
file is the caller's business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models.blocks import TransformerParts
from scalerun.models.stack import Stack
from scalerun.models.torchscale_state import check_fit, drop_tied
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_lm import TransformerLM
from scalerun.modules.positions.learned import OFFSET
from scalerun.modules.positions.xpos import pair_scales

VERSIONS = ("main", "0.3.0")

SAME_MEANING: dict[str, Any] = {
    "decoder_embed_dim": 768,
    "decoder_attention_heads": 12,
    "decoder_ffn_embed_dim": 3072,
    "decoder_layers": 12,
    "activation_fn": "gelu",
    "dropout": 0.0,
    "drop_path_rate": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "no_scale_embedding": True,
    "layernorm_embedding": False,
    "share_decoder_input_output_embed": False,
    "layernorm_eps": 1e-5,
    "rel_pos_buckets": 0,
    "max_rel_pos": 0,
    "checkpoint_activations": False,
    "xpos_rel_pos": False,
    "xpos_scale_base": 512,
}
"""Fields copied as they are, with TorchScale's defaults."""

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
    "segment_length": (None, ""),
    "dilated_ratio": (None, ""),
    "seq_parallel": (False,),
}
"""Fields with another architecture behind them, and the values that leave it switched off."""

WITHOUT_EFFECT = frozenset(
    {
        "bert_init",
        "ddp_rank",
        "encoder_normalize_before",
        "flash_attention",
        "fsdp",
        "max_target_positions",
        "moe_eval_capacity_token_fraction",
        "moe_expert_count",
        "moe_gating_use_fp32",
        "moe_normalize_gate_prob_before_dropping",
        "moe_second_expert_policy",
        "moe_top1_expert",
        "vocab_size",
    }
)
"""Fields that do not change what a dense decoder computes once its weights are loaded."""

RENAMES = (
    (r"embed_tokens\.(weight)", r"embedding.tokens.\1"),
    (r"embed_positions\.(weight)", r"embedding.positions.\1"),
    (r"layernorm_embedding\.(weight|bias)", r"embedding.norm.\1"),
    (r"layer_norm\.(weight|bias)", r"final_norm.\1"),
    (r"output_projection\.(weight)", r"output_projection.\1"),
    (
        r"self_attn_relative_position\.relative_attention_bias\.(weight)",
        r"relative_position.\1",
    ),
    (r"layers\.(\d+)\.self_attn\.([qkv]|out)_proj\.(weight|bias)", r"layers.\1.mixer.\2_proj.\3"),
    (r"layers\.(\d+)\.self_attn\.inner_attn_ln\.(weight|bias)", r"layers.\1.mixer.inner_norm.\2"),
    (r"layers\.(\d+)\.self_attn_layer_norm\.(weight|bias)", r"layers.\1.mixer_residual.norm.\2"),
    (r"layers\.(\d+)\.ffn\.(fc1|fc2)\.(weight|bias)", r"layers.\1.ffn.\2.\3"),
    (r"layers\.(\d+)\.ffn\.ffn_layernorm\.(weight|bias)", r"layers.\1.ffn.inner_norm.\2"),
    (r"layers\.(\d+)\.final_layer_norm\.(weight|bias)", r"layers.\1.ffn_residual.norm.\2"),
)


def convert_config(fields: Mapping[str, Any], *, version: str) -> tuple[TransformerConfig, Stack]:
    """The configuration and the parts that TorchScale builds from a ``DecoderConfig``.

    Args:
        fields: what was passed to ``DecoderConfig``; what is left out has TorchScale's default.
        version: ``main`` or ``0.3.0``. They differ in whether DeepNorm and SubLN move the norms:
            in ``main`` a decoder keeps its own ``decoder_normalize_before``, so that DeepNorm is
            pre-norm unless that is switched off.

    Raises:
        ConfigError: a field is unknown, or chooses an architecture that is not a dense decoder.
    """
    if version not in VERSIONS:
        raise ConfigError(f"TorchScale version {version!r} is not known (choices: main, 0.3.0)")
    for name, value in fields.items():
        if name in REFUSED and value not in REFUSED[name]:
            raise ConfigError(f"TorchScale's {name}={value!r} is not a plain dense decoder")
        if name not in {*SAME_MEANING, *NORM_FIELDS, *REFUSED, *WITHOUT_EFFECT}:
            raise ConfigError(f"TorchScale's DecoderConfig has no field {name!r}")
    settings = {name: fields.get(name, default) for name, default in SAME_MEANING.items()}
    norm = {name: bool(fields.get(name, default)) for name, default in NORM_FIELDS.items()}
    deepnorm = norm["deepnorm"]
    subln = norm["subln"] and not deepnorm
    before = norm["decoder_normalize_before"]
    if version == "0.3.0" and (deepnorm or subln):
        before = not deepnorm
    cfg = TransformerConfig(**settings, deepnorm=deepnorm, subln=subln, init="torchscale")
    cfg.validate()
    moved = "pre_norm" if before else "deep_norm" if deepnorm else "post_norm"
    stack = cfg.decoder_stack()
    return cfg, replace(
        stack, axes=replace(stack.axes, residual=moved), final_norm=moved == "pre_norm"
    )


def convert_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under our names; tables that we compute are dropped.

    Raises:
        UserError: a key is not one of a dense decoder's, or a stored XPos table has other values.
    """
    converted: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if key == "embed_positions._float_tensor":
            continue
        if re.fullmatch(r"layers\.\d+\.self_attn\.xpos\.scale", key):
            _check_xpos_table(key, tensor)
            continue
        for pattern, name in RENAMES:
            match = re.fullmatch(pattern, key)
            if match:
                converted[match.expand(name)] = tensor
                break
        else:
            raise UserError(f"the state dict has {key}, which no dense TorchScale decoder has")
    return converted


def load_decoder(
    fields: Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    version: str,
    padding_idx: int | None = None,
) -> TransformerLM:
    """A decoder on the CPU, in float32, with TorchScale's weights.

    Args:
        fields: what was passed to ``DecoderConfig``; see :func:`convert_config`.
        state: the decoder's state dict, its keys without prefix.
        version: which TorchScale trained it: ``main`` or ``0.3.0``.
        padding_idx: number of the padding symbol.

    Raises:
        ConfigError: the configuration is not one of a dense decoder.
        UserError: keys or shapes do not fit the configuration.
    """
    cfg, stack = convert_config(fields, version=version)
    weights = convert_state_dict(state)
    if "embedding.tokens.weight" not in weights:
        raise UserError("the state dict has no embed_tokens.weight")
    positions = "none"
    if "embed_positions._float_tensor" in state:
        positions = "sinusoidal"
    table = weights.get("embedding.positions.weight")
    if table is not None:
        positions = "learned"
        stack = replace(stack, max_positions=table.shape[0] - OFFSET)
    if cfg.share_decoder_input_output_embed:
        drop_tied(weights)
    stack = replace(stack, axes=replace(stack.axes, absolute_position=positions))
    vocab_size = weights["embedding.tokens.weight"].shape[0]
    with torch.device("meta"):
        model = TransformerLM(
            TransformerParts(cfg, stack, vocab_size=vocab_size, padding_idx=padding_idx)
        )
    model.to_empty(device="cpu")
    check_fit(model.state_dict(), weights)
    model.load_state_dict(weights)
    return model


def _check_xpos_table(key: str, table: Tensor) -> None:
    ours = pair_scales(2 * table.numel())
    # The tolerance admits tables that were stored in half precision.
    if not torch.allclose(table.float().flatten(), ours, rtol=1e-3, atol=0.0):
        raise UserError(f"the state dict's {key} is not the table of XPos")
