"""TorchScale's mixtures of experts: their settings, and their experts stacked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.torchscale.configs import SharedConfig

GATE_RENAMES = (
    ("layers.{layer}.moe_layer.gate.wg.weight", "layers.{layer}.ffn.router.gate.weight"),
    (
        "layers.{layer}.moe_layer.gate.wg_reduction.weight",
        "layers.{layer}.ffn.router.gate.reduction",
    ),
    ("layers.{layer}.moe_layer.gate.wg", "layers.{layer}.ffn.router.gate.expert_rows"),
)
MOE = (
    "moe_freq",
    "moe_expert_count",
    "moe_top1_expert",
    "moe_gating_use_fp32",
    "moe_eval_capacity_token_fraction",
    "moe_second_expert_policy",
    "moe_normalize_gate_prob_before_dropping",
    "use_xmoe",
)
"""Fields that mean the same here."""
EXPERT_KEY = re.compile(
    r"layers\.(\d+)\.moe_layer\.experts\.(\d+)\.(fc1|fc2|ffn_layernorm)\.(weight|bias)"
)
STACKED_KEY = re.compile(r"layers\.(\d+)\.ffn\.experts\.(fc1_|fc2_|inner_norm\.)(weight|bias)")


def moe_settings(given: SharedConfig) -> dict[str, Any]:
    """Our settings for TorchScale's: padding takes places, and evaluation draws second experts.

    X-MoE is spelled out, since a configuration whose fields were set one by one need not have what
    ``use_xmoe`` implies.
    """
    layers = max(getattr(given, f"{side}_layers", 0) for side in ("encoder", "decoder"))
    if not 0 < given.moe_freq <= layers:
        return {}
    share = given.moe_eval_capacity_token_fraction
    settings: dict[str, Any] = {
        "moe_freq": given.moe_freq,
        "moe_expert_count": given.moe_expert_count,
        "moe_top1_expert": given.moe_top1_expert,
        "moe_gate": "xmoe" if given.use_xmoe else "linear",
        "moe_gating_use_fp32": given.moe_gating_use_fp32,
        # TorchScale takes any share that is not above 0 as -1.
        "moe_eval_capacity_token_fraction": share if share > 0 else -1.0,
        "moe_mask_padding": False,
    }
    if not given.moe_top1_expert:
        policy = given.moe_second_expert_policy
        normalize = given.moe_normalize_gate_prob_before_dropping
        settings |= {
            "moe_second_expert_policy": policy,
            "moe_normalize_gate_prob_before_dropping": normalize,
            "moe_deterministic_eval": policy == "all",
        }
    return settings


def stack_experts(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state dict without its experts, and these under our names, in the order of their numbers.

    Raises:
        UserError: an expert is missing, or shaped unlike the others.
    """
    rest: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for key, tensor in state.items():
        match = EXPERT_KEY.fullmatch(key)
        if match is None:
            rest[key] = tensor
            continue
        layer, number, part, kind = match.groups()
        name = f"inner_norm.{kind}" if part == "ffn_layernorm" else f"{part}_{kind}"
        experts.setdefault(f"layers.{layer}.ffn.experts.{name}", {})[int(number)] = tensor
    stacked = {}
    for name, by_number in experts.items():
        tensors = [by_number[number] for number in sorted(by_number)]
        if max(by_number) != len(tensors) - 1 or len({t.shape for t in tensors}) > 1:
            raise UserError(f"the state dict's experts of {name} are not all there, or differ")
        stacked[name] = torch.stack(tensors)
    return rest, stacked


def expert_keys(name: str, num_experts: int) -> list[str] | None:
    """TorchScale's keys for what we stack under a name, by number; None if it is no such name."""
    match = STACKED_KEY.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    part = "ffn_layernorm" if part == "inner_norm." else part.rstrip("_")
    return [f"layers.{layer}.moe_layer.experts.{e}.{part}.{kind}" for e in range(num_experts)]
