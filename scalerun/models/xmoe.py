"""X-MoE: transformers whose every second layer has experts.

Source: Chi et al. 2022, arXiv:2204.09179. The plain block's feed-forward layer becomes a mixture of
experts of the same shape, of which two see each token; the gate compares tokens and experts in a
small space. The presets have TorchScale's form of that gate, whose comparison is no cosine; with
``--moe-gate xmoe_cosine`` they have the paper's.
"""

from __future__ import annotations

from typing import Any

from scalerun.models.base_model import register_model_architecture
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_lm import MODEL, gpt_base, lm_base, lm_tiny
from scalerun.models.transformer_mlm import MODEL as MLM_MODEL
from scalerun.models.transformer_mlm import TransformerMLMConfig, bert_base
from scalerun.models.transformer_mt import MODEL as MT_MODEL
from scalerun.models.transformer_mt import TransformerMTConfig, mt_tied_base

XMOE: dict[str, Any] = {
    "moe_freq": 2,
    "moe_second_expert_policy": "random",
    "moe_normalize_gate_prob_before_dropping": True,
    "moe_gating_use_fp32": True,
    "moe_eval_capacity_token_fraction": -1.0,
    "use_xmoe": True,
}
"""The settings of TorchScale's documented X-MoE commands."""


@register_model_architecture(MODEL, "xmoe_tiny")
def xmoe_tiny() -> TransformerConfig:
    """``lm_tiny`` with 8 experts in every second layer: 2.7 million parameters (264 symbols).

    In evaluation every token finds a place, so that no text depends on its neighbours in a batch.
    """
    settings = XMOE | {"moe_eval_capacity_token_fraction": 1.0}
    return lm_tiny().replace(**settings, moe_expert_count=8)


@register_model_architecture(MODEL, "xmoe_base")
def xmoe_base() -> TransformerConfig:
    """``lm_base`` with 64 experts in every second layer, as TorchScale's BERT example has them."""
    return lm_base().replace(**XMOE, moe_expert_count=64)


@register_model_architecture(MODEL, "xmoe_gpt_base")
def xmoe_gpt_base() -> TransformerConfig:
    """``gpt_base`` with 2 experts, as in TorchScale's command."""
    return gpt_base().replace(**XMOE, moe_expert_count=2)


@register_model_architecture(MLM_MODEL, "xmoe_bert_base")
def xmoe_bert_base() -> TransformerMLMConfig:
    """``bert_base`` with 64 experts, as in TorchScale's command."""
    return bert_base().replace(**XMOE, moe_expert_count=64)


@register_model_architecture(MT_MODEL, "xmoe_mt_base")
def xmoe_mt_base() -> TransformerMTConfig:
    """``mt_tied_base`` with 2 experts in encoder and decoder, as in TorchScale's command."""
    return mt_tied_base().replace(**XMOE, moe_expert_count=2)
