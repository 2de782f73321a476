"""Decoders that the transformers library has no class for: their settings for our own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scalerun.dataclass.errors import UserError
from scalerun.models.retnet import RetNetConfig
from scalerun.models.transformer_config import TransformerConfig

MODELLING_FILE = Path(__file__).with_name("modeling_scalerun.py")
"""Goes into the folder of every such model."""
CLASSES = {
    "model_type": "scalerun",
    "architectures": ["ScalerunForCausalLM"],
    "auto_map": {
        "AutoConfig": "modeling_scalerun.ScalerunConfig",
        "AutoModelForCausalLM": "modeling_scalerun.ScalerunForCausalLM",
    },
    "use_cache": False,
    "tie_word_embeddings": False,
}
"""``tied_output`` says whether the tables are one: nothing is left for the library to tie."""


def custom_fields(cfg: Any, vocab_size: int) -> dict[str, Any]:
    """The fields of ``config.json``.

    Args:
        cfg: settings of a model.
        vocab_size: rows of its embedding.

    Raises:
        UserError: it is no decoder, or computes what the modelling file does not.
    """
    if type(cfg) not in (TransformerConfig, RetNetConfig):
        raise UserError(
            f"a model of --arch {cfg._name} cannot be converted for transformers; decoders, "
            "LongNets and RetNets can"
        )
    stack, axes = cfg.decoder_stack(), cfg.decoder_stack().axes
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": stack.dim,
        "num_hidden_layers": stack.num_layers,
        "num_attention_heads": stack.num_heads,
        "ffn_dim": stack.ffn_dim,
        "max_position_embeddings": stack.max_positions,
        "mixer": axes.mixer,
        "absolute_position": axes.absolute_position,
        "relative_position": axes.relative_position,
        "residual": axes.residual,
        "alpha": axes.alpha,
        "ffn": axes.ffn,
        "activation": cfg.activation_fn,
        "norm": axes.norm,
        "norm_eps": cfg.layernorm_eps,
        "inner_norm": axes.inner_norm,
        "ffn_inner_norm": axes.inner_norm,
        "expert_inner_norm": cfg.subln,
        "final_norm": stack.final_norm,
        "embedding_norm": cfg.layernorm_embedding,
        "embedding_scale": 1.0 if cfg.no_scale_embedding else stack.dim**0.5,
        "tied_output": stack.tied_output,
        "moe_freq": cfg.moe_freq,
        **_expert_fields(cfg),
    }
    if isinstance(cfg, RetNetConfig):
        return fields | _retention_fields(cfg) | CLASSES
    return fields | _attention_fields(cfg) | CLASSES


def _attention_fields(cfg: TransformerConfig) -> dict[str, Any]:
    return {
        "xpos_scale_base": cfg.xpos_scale_base,
        "rel_pos_buckets": cfg.rel_pos_buckets,
        "max_rel_pos": cfg.max_rel_pos,
        "segment_length": list(cfg.segment_length),
        "dilated_ratio": list(cfg.dilated_ratio),
        "dilated_head_offset": cfg.dilated_head_offset,
    }


def _retention_fields(cfg: RetNetConfig) -> dict[str, Any]:
    if cfg.chunkwise_recurrent and cfg.norm_eps_mode != "scale_free":
        raise UserError(
            f"a RetNet with --chunkwise-recurrent and --norm-eps-mode {cfg.norm_eps_mode} cannot "
            "be converted for transformers: it depends on its chunks; scale_free can"
        )
    return {"value_dim": cfg.decoder_value_embed_dim, "norm_eps_mode": cfg.norm_eps_mode}


def _expert_fields(cfg: TransformerConfig | RetNetConfig) -> dict[str, Any]:
    if cfg.moe_freq == 0:
        return {}
    if not cfg.moe_deterministic_eval:
        raise UserError(
            "a model with --no-moe-deterministic-eval cannot be converted for transformers: it "
            "draws second experts"
        )
    gating = cfg.gating()
    return {
        "num_experts": cfg.moe_expert_count,
        "experts_per_token": gating.top_k,
        "gate": cfg.gate_name(),
        "gate_in_float32": gating.float32,
        "second_expert": gating.second_expert,
        "normalize_before_dropping": gating.normalize_before_dropping,
        "capacity_fraction": gating.eval_capacity_fraction,
        "mask_padding": cfg.moe_mask_padding,
    }
