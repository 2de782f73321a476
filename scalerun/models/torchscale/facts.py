"""What the keys and shapes of TorchScale's state dicts say about a model, and what they do not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError

State = Mapping[str, Tensor]
SIDES = ("encoder", "decoder")
EMBEDDING, OUTPUT = "embed_tokens.weight", "output_projection.weight"
EXPERTS_INSTEAD = r"(ffn|moe_layer\.experts\.0)"
FFN = rf"layers\.0\.{EXPERTS_INSTEAD}(\.A)?\.fc1\.weight"
GATE = r"layers\.(\d+)\.moe_layer\.gate\.wg(\.weight)?"
DECAY = "retnet_rel_pos.decay"
"""One number for each head of a RetNet."""


def stack_facts(side: str, state: State) -> dict[str, Any]:
    """Fields of TorchScale's configuration that one stack's state dict decides.

    Args:
        side: ``encoder`` or ``decoder``.
        state: keys without prefix.

    Raises:
        UserError: these are not the keys of a stack.
    """
    dim = _shape(state, r"layers\.0\.self_attn_layer_norm(\.A)?\.weight")[0]
    buckets, xpos = relative_table(state), _first(state, r"layers\.\d+\.self_attn\.xpos\.scale")
    facts: dict[str, Any] = {
        f"{side}_embed_dim": dim,
        f"{side}_layers": num_layers(state),
        f"{side}_ffn_embed_dim": _shape(state, FFN)[0],
        "subln": _first(state, r"layers\.\d+\.self_attn\.inner_attn_ln\..*") is not None,
        "multiway": any(".A." in key for key in state),
        "layernorm_embedding": _first(state, r"layernorm_embedding\..*") is not None,
        "xpos_rel_pos": xpos is not None,
        "rel_pos_buckets": 0 if buckets is None else buckets.shape[0],
    }
    if buckets is not None:
        facts[f"{side}_attention_heads"] = buckets.shape[1]
    elif xpos is not None:
        facts[f"{side}_attention_heads"] = dim // (2 * state[xpos].numel())
    return facts


def expert_facts(state: State) -> dict[str, Any]:
    """Fields of the layers of experts; of a stack without such layers nothing."""
    gates = {key: match for key in state if (match := re.fullmatch(GATE, key))}
    if not gates:
        return {}
    first = min(gates, key=lambda key: int(gates[key][1]))
    return {
        "moe_freq": int(gates[first][1]) + 1,
        "moe_expert_count": state[first].shape[0],
        "use_xmoe": gates[first][2] is None,
    }


def unsaid_of_experts(facts: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """As :func:`unsaid`, of layers of experts."""
    names = ["moe_top1_expert", "moe_gating_use_fp32", "moe_eval_capacity_token_fraction"]
    if not (facts["use_xmoe"] or given.get("moe_top1_expert")):
        names += ["moe_second_expert_policy", "moe_normalize_gate_prob_before_dropping"]
    return names


def retention_facts(state: State) -> dict[str, Any]:
    """As :func:`stack_facts`, of a RetNet."""
    facts: dict[str, Any] = {
        "decoder_embed_dim": _shape(state, r"layers\.0\.retention\.q_proj\.weight")[0],
        "decoder_value_embed_dim": _shape(state, r"layers\.0\.retention\.v_proj\.weight")[0],
        "decoder_layers": num_layers(state),
        "decoder_ffn_embed_dim": _shape(state, FFN)[0],
        "layernorm_embedding": _first(state, r"layernorm_embedding\..*") is not None,
    }
    if DECAY in state:
        facts["decoder_retention_heads"] = state[DECAY].numel()
    return facts


def unsaid_of_retention(facts: Mapping[str, Any]) -> list[str]:
    """As :func:`unsaid`, of a RetNet."""
    names = ["activation_fn", "layernorm_eps", "no_scale_embedding", "deepnorm"]
    heads = "decoder_retention_heads"
    return names if heads in facts else [heads, *names]


def stack_hints(side: str, state: State) -> dict[str, Any]:
    """Fields whose value follows from the state dict unless the configuration says otherwise."""
    final = has_final_norm(state)
    hints: dict[str, Any] = {}
    if side == "decoder" or final:
        hints[f"{side}_normalize_before"] = final
    if side == "encoder":
        hints["normalize_output"] = final
    output, tokens = state.get(OUTPUT), state.get(EMBEDDING)
    if tokens is not None:
        equal = output is not None and same(output, tokens)
        tied = equal or (side == "decoder" and output is None)
        hints[f"share_{side}_input_output_embed"] = tied
    return hints


def unsaid(side: str, state: State, facts: Mapping[str, Any]) -> list[str]:
    """Fields that decide what a stack computes and leave no trace in its state dict."""
    names = ["activation_fn", "layernorm_eps", "no_scale_embedding", "segment_length"]
    if f"{side}_attention_heads" not in facts:
        names.insert(0, f"{side}_attention_heads")
    if not facts["subln"]:
        names.append("deepnorm")
        if side == "encoder" and not has_final_norm(state):
            names.append("encoder_normalize_before")
    if facts["xpos_rel_pos"]:
        names.append("xpos_scale_base")
    if facts["rel_pos_buckets"]:
        names.append("max_rel_pos")
    return names


def has_final_norm(state: State) -> bool:
    """Whether there is a norm after the last layer."""
    return _first(state, r"layer_norm(\.A)?\.weight") is not None


def relative_table(state: State) -> Tensor | None:
    """(buckets, heads), the score biases by distance."""
    name = r"(self_attn_)?relative_position\.relative_attention_bias\.weight"
    key = _first(state, name)
    return None if key is None else state[key]


def num_layers(state: State) -> int:
    """Layers of a stack.

    Raises:
        UserError: numbers are missing.
    """
    found = {int(match[1]) for key in state if (match := re.match(r"layers\.(\d+)\.", key))}
    missing = sorted(set(range(max(found, default=0) + 1)) - found)
    if missing:
        raise UserError(f"the state dict has no keys of layers.{missing[0]}")
    return len(found)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers."""
    return a.shape == b.shape and torch.equal(a, b)


def _first(state: State, pattern: str) -> str | None:
    return next((key for key in state if re.fullmatch(pattern, key)), None)


def _shape(state: State, pattern: str) -> torch.Size:
    key = _first(state, pattern)
    if key is None:
        plain = pattern.replace(r"(\.A)?", "").replace(EXPERTS_INSTEAD, "ffn").replace("\\", "")
        raise UserError(f"the state dict has no {plain}, so it is none of these models")
    return state[key].shape
