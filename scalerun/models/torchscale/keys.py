"""TorchScale's state-dict keys under scalerun's names."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.torchscale.moe import GATE_RENAMES, stack_experts
from scalerun.modules.positions.xpos import pair_scales

HALF = r"((?:\.[AB])?)"
"""Which half of a multiway layer, if it is one."""

RENAMES = (
    (r"embed_tokens\.(weight)", r"embedding.tokens.\1"),
    (rf"embed_positions{HALF}\.(weight)", r"embedding.positions\1.\2"),
    (rf"layernorm_embedding{HALF}\.(weight|bias)", r"embedding.norm\1.\2"),
    (rf"layer_norm{HALF}\.(weight|bias)", r"final_norm\1.\2"),
    (r"output_projection\.(weight)", r"output_projection.\1"),
    (r"output_projection\.(dense\.weight|dense\.bias|bias)", r"head.\1"),
    (r"output_projection\.layer_norm\.(weight|bias)", r"head.norm.\1"),
    (
        r"(?:self_attn_)?relative_position\.relative_attention_bias\.(weight)",
        r"relative_position.\1",
    ),
    (r"cross_attn_relative_position\.relative_attention_bias\.(weight)", r"cross_position.\1"),
    (
        rf"layers\.(\d+)\.self_attn\.([qkv]|out)_proj{HALF}\.(weight|bias)",
        r"layers.\1.mixer.\2_proj\3.\4",
    ),
    (
        rf"layers\.(\d+)\.self_attn\.inner_attn_ln{HALF}\.(weight|bias)",
        r"layers.\1.mixer.inner_norm\2.\3",
    ),
    (
        rf"layers\.(\d+)\.self_attn_layer_norm{HALF}\.(weight|bias)",
        r"layers.\1.mixer_residual.norm\2.\3",
    ),
    (
        r"layers\.(\d+)\.encoder_attn\.([qkv]|out)_proj\.(weight|bias)",
        r"layers.\1.cross_mixer.\2_proj.\3",
    ),
    (
        r"layers\.(\d+)\.encoder_attn_layer_norm\.(weight|bias)",
        r"layers.\1.cross_residual.norm.\2",
    ),
    (rf"layers\.(\d+)\.ffn{HALF}\.(fc1|fc2)\.(weight|bias)", r"layers.\1.ffn\2.\3.\4"),
    (
        rf"layers\.(\d+)\.ffn{HALF}\.ffn_layernorm\.(weight|bias)",
        r"layers.\1.ffn\2.inner_norm.\3",
    ),
    (
        rf"layers\.(\d+)\.final_layer_norm{HALF}\.(weight|bias)",
        r"layers.\1.ffn_residual.norm\2.\3",
    ),
    *GATE_RENAMES,
)
SINUSOIDAL_KEY = "embed_positions._float_tensor"


def convert_keys(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under our names; tables that we compute are dropped.

    Raises:
        UserError: a key is not one of a stack's, or a stored XPos table has other values.
    """
    dense, converted = stack_experts(state)
    for key, tensor in dense.items():
        if key == SINUSOIDAL_KEY:
            continue
        if re.fullmatch(r"layers\.\d+\.self_attn\.xpos\.scale", key):
            _check_xpos_table(key, tensor)
            continue
        converted[_renamed(key)] = tensor
    return converted


def without_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The part of a state dict whose keys begin with ``prefix``, which is cut off."""
    return {key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)}


def drop_unused_halves(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A multiway decoder's state dict without its B halves, which no token ever went through."""
    kept = {key: t for key, t in state.items() if ".B." not in key}
    return {key.replace(".A.", "."): tensor for key, tensor in kept.items()}


def _renamed(key: str) -> str:
    for pattern, name in RENAMES:
        match = re.fullmatch(pattern, key)
        if match:
            return match.expand(name)
    raise UserError(f"the state dict has {key}, which this kind of TorchScale model does not have")


def _check_xpos_table(key: str, table: Tensor) -> None:
    ours = pair_scales(2 * table.numel())
    # The tolerance admits tables that were stored in half precision.
    if not torch.allclose(table.float().flatten(), ours, rtol=1e-3, atol=0.0):
        raise UserError(f"the state dict's {key} is not the table of XPos")
