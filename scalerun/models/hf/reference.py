"""OPT and GPT-2 once more, written from their formulas over the library's own names.

Nothing of scalerun's layers is used here: what is converted is compared with this where the
library itself is not installed. B batch, T tokens, H heads, K width of a head, D model width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = Mapping[str, Tensor]
OPT_OFFSET = 2
"""OPT's position 0 has row 2."""

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "swish": lambda x: x * torch.sigmoid(x),
}


def opt_logits(config: Mapping[str, Any], state: State, tokens_BT: Tensor, act: str) -> Tensor:
    """(B, T, V) of OPT.

    Args:
        config: complete fields of ``config.json``.
        state: weights by the names of ``OPTForCausalLM``.
        act: our name of the activation.
    """
    heads, before = config["num_attention_heads"], config["do_layer_norm_before"]
    decoder = "model.decoder."
    state = {re.sub(r"^decoder\.", decoder, key): tensor for key, tensor in state.items()}
    rows_T = torch.arange(tokens_BT.shape[1]) + OPT_OFFSET
    x_BTD = state[f"{decoder}embed_tokens.weight"][tokens_BT].float()
    x_BTD = x_BTD + state[f"{decoder}embed_positions.weight"][rows_T].float()
    for layer in range(config["num_hidden_layers"]):
        at = f"{decoder}layers.{layer}."

        def attend(y: Tensor, at: str = at) -> Tensor:
            q, k, v = (_linear(y, state, f"{at}self_attn.{name}_proj") for name in "qkv")
            return _linear(_attention(q, k, v, heads), state, f"{at}self_attn.out_proj")

        def compute(y: Tensor, at: str = at) -> Tensor:
            return _linear(FUNCTIONS[act](_linear(y, state, f"{at}fc1")), state, f"{at}fc2")

        for branch, norm in ((attend, "self_attn_layer_norm"), (compute, "final_layer_norm")):
            if before:
                x_BTD = x_BTD + branch(_norm(x_BTD, state, at + norm, 1e-5))
            else:
                x_BTD = _norm(x_BTD + branch(x_BTD), state, at + norm, 1e-5)
    if before:
        x_BTD = _norm(x_BTD, state, f"{decoder}final_layer_norm", 1e-5)
    tied = config["tie_word_embeddings"]
    return x_BTD @ state[f"{decoder}embed_tokens.weight" if tied else "lm_head.weight"].float().T


def gpt2_logits(config: Mapping[str, Any], state: State, tokens_BT: Tensor, act: str) -> Tensor:
    """(B, T, V) of GPT-2; arguments as in :func:`opt_logits`."""
    state = {key.removeprefix("transformer."): tensor for key, tensor in state.items()}
    eps = config["layer_norm_epsilon"]
    x_BTD = state["wte.weight"][tokens_BT].float()
    x_BTD = x_BTD + state["wpe.weight"][: tokens_BT.shape[1]].float()
    for layer in range(config["n_layer"]):
        at = f"h.{layer}."
        y = _product(_norm(x_BTD, state, f"{at}ln_1", eps), state, f"{at}attn.c_attn")
        q, k, v = y.chunk(3, dim=-1)
        y = _attention(q, k, v, config["n_head"])
        x_BTD = x_BTD + _product(y, state, f"{at}attn.c_proj")
        y = _product(_norm(x_BTD, state, f"{at}ln_2", eps), state, f"{at}mlp.c_fc")
        x_BTD = x_BTD + _product(FUNCTIONS[act](y), state, f"{at}mlp.c_proj")
    tied = config["tie_word_embeddings"]
    table = state["wte.weight" if tied else "lm_head.weight"].float()
    return _norm(x_BTD, state, "ln_f", eps) @ table.T


REFERENCES = {"opt": opt_logits, "gpt2": gpt2_logits}


def _norm(x: Tensor, state: State, name: str, eps: float) -> Tensor:
    weight, bias = state[f"{name}.weight"].float(), state[f"{name}.bias"].float()
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def _linear(x: Tensor, state: State, name: str) -> Tensor:
    return x @ state[f"{name}.weight"].float().T + state[f"{name}.bias"].float()


def _product(x: Tensor, state: State, name: str) -> Tensor:
    return x @ state[f"{name}.weight"].float() + state[f"{name}.bias"].float()


def _attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores_BHTT = q @ k.mT / math.sqrt(q.shape[-1])
    later_TT = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool).triu(1)
    weights_BHTT = F.softmax(scores_BHTT.masked_fill(later_TT, -math.inf), dim=-1)
    return (weights_BHTT @ v).transpose(1, 2).flatten(2)
