"""TorchScale's state-dict keys under scalerun's names."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.renames import Renames
from scalerun.models.torchscale.moe import GATE_RENAMES, stack_experts
from scalerun.modules.positions.xpos import pair_scales

RENAMES = Renames(
    (
        ("embed_tokens.weight", "embedding.tokens.weight"),
        ("embed_positions{half}.weight", "embedding.positions{half}.weight"),
        ("layernorm_embedding{half}.{kind}", "embedding.norm{half}.{kind}"),
        ("layer_norm{half}.{kind}", "final_norm{half}.{kind}"),
        ("output_projection.weight", "output_projection.weight"),
        ("output_projection.bias", "head.bias"),
        ("output_projection.dense.{kind}", "head.dense.{kind}"),
        ("output_projection.layer_norm.{kind}", "head.norm.{kind}"),
        (
            "self_attn_relative_position.relative_attention_bias.weight",
            "relative_position.weight",
        ),
        ("relative_position.relative_attention_bias.weight", "relative_position.weight"),
        (
            "cross_attn_relative_position.relative_attention_bias.weight",
            "cross_position.weight",
        ),
        (
            "layers.{layer}.self_attn.{qkvo}_proj{half}.{kind}",
            "layers.{layer}.mixer.{qkvo}_proj{half}.{kind}",
        ),
        (
            "layers.{layer}.self_attn.inner_attn_ln{half}.{kind}",
            "layers.{layer}.mixer.inner_norm{half}.{kind}",
        ),
        (
            "layers.{layer}.self_attn_layer_norm{half}.{kind}",
            "layers.{layer}.mixer_residual.norm{half}.{kind}",
        ),
        (
            "layers.{layer}.encoder_attn.{qkvo}_proj.{kind}",
            "layers.{layer}.cross_mixer.{qkvo}_proj.{kind}",
        ),
        (
            "layers.{layer}.encoder_attn_layer_norm.{kind}",
            "layers.{layer}.cross_residual.norm.{kind}",
        ),
        ("layers.{layer}.ffn{half}.{fc}.{kind}", "layers.{layer}.ffn{half}.{fc}.{kind}"),
        (
            "layers.{layer}.ffn{half}.ffn_layernorm.{kind}",
            "layers.{layer}.ffn{half}.inner_norm.{kind}",
        ),
        (
            "layers.{layer}.final_layer_norm{half}.{kind}",
            "layers.{layer}.ffn_residual.norm{half}.{kind}",
        ),
        *GATE_RENAMES,
    )
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
        name = RENAMES.ours(key)
        if name is None:
            raise UserError(
                f"the state dict has {key}, which this kind of TorchScale model does not have"
            )
        converted[name] = tensor
    return converted


def without_prefix(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The part of a state dict whose keys begin with ``prefix``, which is cut off."""
    return {key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)}


def drop_unused_halves(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A multiway decoder's state dict without its B halves, which no token ever went through."""
    kept = {key: t for key, t in state.items() if ".B." not in key}
    return {key.replace(".A.", "."): tensor for key, tensor in kept.items()}


def _check_xpos_table(key: str, table: Tensor) -> None:
    ours = pair_scales(2 * table.numel())
    # The tolerance admits tables that were stored in half precision.
    if not torch.allclose(table.float().flatten(), ours, rtol=1e-3, atol=0.0):
        raise UserError(f"the state dict's {key} is not the table of XPos")
