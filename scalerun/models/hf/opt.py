"""OPT of the transformers library (Zhang et al. 2022, arXiv:2205.01068)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.base_model import Architecture
from scalerun.models.hf.family import ACTIVATIONS, Family, State
from scalerun.models.renames import Renames
from scalerun.models.transformer_config import TransformerConfig

LAYER = "model.decoder.layers.{layer}"
RENAMES = Renames(
    (
        ("model.decoder.embed_tokens.weight", "embedding.tokens.weight"),
        ("model.decoder.embed_positions.weight", "embedding.positions.weight"),
        ("model.decoder.final_layer_norm.{kind}", "final_norm.{kind}"),
        ("lm_head.weight", "output_projection.weight"),
        (f"{LAYER}.self_attn.{{qkvo}}_proj.{{kind}}", "layers.{layer}.mixer.{qkvo}_proj.{kind}"),
        (f"{LAYER}.self_attn_layer_norm.{{kind}}", "layers.{layer}.mixer_residual.norm.{kind}"),
        (f"{LAYER}.{{fc}}.{{kind}}", "layers.{layer}.ffn.{fc}.{kind}"),
        (f"{LAYER}.final_layer_norm.{{kind}}", "layers.{layer}.ffn_residual.norm.{kind}"),
    )
)
EPS = 1e-5
"""Of all its norms; no field says so."""
SAME = {
    "hidden_size": "decoder_embed_dim",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "ffn_dim": "decoder_ffn_embed_dim",
    "max_position_embeddings": "max_target_positions",
    "do_layer_norm_before": "decoder_normalize_before",
    "tie_word_embeddings": "share_decoder_input_output_embed",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
}
CONSTANT = {
    "decoder_learned_pos": True,
    "no_scale_embedding": True,
    "no_emb_dropout": True,
    "layernorm_eps": EPS,
    "init": "megatron",
}


def _prepare(state: State) -> dict[str, Tensor]:
    """Old files lack the first word of each key."""
    return {re.sub(r"^decoder\.", "model.decoder.", key): tensor for key, tensor in state.items()}


def _more(config: Mapping[str, Any]) -> dict[str, Any]:
    width = config["word_embed_proj_dim"]
    if width not in (None, config["hidden_size"]):
        raise UserError(
            f"config.json has word_embed_proj_dim {width} and hidden_size {config['hidden_size']}: "
            "embeddings of another width than the model (as OPT-350m has) have no form here"
        )
    return {}


OPT = Family(
    model_type="opt",
    defaults={
        "vocab_size": 50272,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "tie_word_embeddings": True,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_function": "relu",
        "word_embed_proj_dim": None,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
    },
    same=SAME,
    only={
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
    },
    constant=CONSTANT,
    more=_more,
    renames=RENAMES,
    prepare=_prepare,
    unused=r"(model\.)?decoder\.version",
)


def opt_fields(cfg: TransformerConfig, vocab_size: int) -> dict[str, Any] | None:
    """OPT's fields for a decoder; None if it is no OPT model.

    Args:
        cfg: of a model whose settings are complete.
        vocab_size: rows of its embedding.
    """
    own = cfg.resolved()
    same = {ours: getattr(own, ours) for ours in SAME.values()}
    plain = TransformerConfig(**{**CONSTANT, **same, "activation_fn": own.activation_fn})
    saved = {name: value for name, value in own.to_dict().items() if name != "_name"}
    if Architecture(plain).differences({"settings": saved}):
        return None
    names = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    fields = {theirs: getattr(own, ours) for theirs, ours in SAME.items()}
    return fields | {
        "vocab_size": vocab_size,
        "activation_function": names[own.activation_fn],
        "word_embed_proj_dim": own.decoder_embed_dim,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    }
