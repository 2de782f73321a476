"""GPT-2 of the transformers library (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.hf.family import Family, State
from scalerun.models.renames import Renames
from scalerun.modules.positions.learned import OFFSET

RENAMES = Renames(
    (
        ("wte.weight", "embedding.tokens.weight"),
        ("wpe.weight", "embedding.positions.weight"),
        ("ln_f.{kind}", "final_norm.{kind}"),
        ("lm_head.weight", "output_projection.weight"),
        ("h.{layer}.ln_1.{kind}", "layers.{layer}.mixer_residual.norm.{kind}"),
        ("h.{layer}.attn.{qkvo}_proj.{kind}", "layers.{layer}.mixer.{qkvo}_proj.{kind}"),
        ("h.{layer}.ln_2.{kind}", "layers.{layer}.ffn_residual.norm.{kind}"),
        ("h.{layer}.mlp.{fc}.{kind}", "layers.{layer}.ffn.{fc}.{kind}"),
    )
)
TRANSPOSED = {"attn.c_proj": "attn.out_proj", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
"""Layers that store a matrix the other way round, and their names in the table above."""
JOINED = "attn.c_attn"
"""Queries, keys and values in this order, the other way round too."""
BUFFERS = r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"
"""Masks that old files hold."""


def _prepare(state: State) -> dict[str, Tensor]:
    """One matrix for each projection, as it multiplies; positions from row 2 on."""
    prepared: dict[str, Tensor] = {}
    for key, tensor in state.items():
        key = key.removeprefix("transformer.")
        layer, _, kind = key.rpartition(".")
        if layer.endswith(JOINED):
            for name, third in zip("qkv", _turned(tensor).chunk(3), strict=True):
                prepared[f"{layer.removesuffix(JOINED)}attn.{name}_proj.{kind}"] = third
            continue
        for theirs, ours in TRANSPOSED.items():
            if layer.endswith(theirs):
                layer, tensor = layer.replace(theirs, ours), _turned(tensor)
        if layer == "wpe":
            tensor = _with_offset(tensor)
        prepared[f"{layer}.{kind}"] = tensor
    return prepared


def _turned(tensor: Tensor) -> Tensor:
    return tensor.t() if tensor.dim() == 2 else tensor


def _with_offset(table: Tensor) -> Tensor:
    """The table behind rows that no position uses."""
    return torch.cat((table.new_zeros((OFFSET, table.shape[1])), table))


def _more(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config["n_inner"]
    rate, of_embedding = config["resid_pdrop"], config["embd_pdrop"]
    if of_embedding not in (rate, 0, 0.0):
        raise UserError(
            f"config.json has embd_pdrop {of_embedding} and resid_pdrop {rate}, which have one "
            "setting here; make them equal, which changes nothing but training"
        )
    return {
        "decoder_ffn_embed_dim": 4 * config["n_embd"] if inner is None else inner,
        "dropout": float(rate),
        "no_emb_dropout": rate > 0 and of_embedding == 0,
    }


GPT2 = Family(
    model_type="gpt2",
    defaults={
        "vocab_size": 50257,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    same={
        "n_embd": "decoder_embed_dim",
        "n_layer": "decoder_layers",
        "n_head": "decoder_attention_heads",
        "n_positions": "max_target_positions",
        "layer_norm_epsilon": "layernorm_eps",
        "attn_pdrop": "attention_dropout",
        "tie_word_embeddings": "share_decoder_input_output_embed",
    },
    only={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    constant={
        "decoder_learned_pos": True,
        "no_scale_embedding": True,
        "decoder_normalize_before": True,
    },
    more=_more,
    renames=RENAMES,
    prepare=_prepare,
    unused=BUFFERS,
)
