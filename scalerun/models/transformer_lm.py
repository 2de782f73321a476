"""The decoder-only language model, and its presets."""

from __future__ import annotations

from functools import partial

from scalerun.models.base_model import register_model, register_model_architecture
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_decoder import TransformerDecoder

MODEL = "transformer_lm"


@register_model(MODEL, TransformerConfig)
class TransformerLM(TransformerDecoder):
    """A stack of blocks on the five axes of :class:`TransformerConfig`.

    An architecture with a part of its own derives from this class, names its subclass of
    :class:`TransformerParts` in ``parts_class`` and registers itself with its own configuration.
    """


@register_model_architecture(MODEL, "lm_tiny")
def lm_tiny() -> TransformerConfig:
    """About one million parameters with a vocabulary of 264 to 2048: minutes on a CPU."""
    return TransformerConfig(
        decoder_embed_dim=128,
        decoder_attention_heads=4,
        decoder_ffn_embed_dim=512,
        decoder_layers=4,
        share_decoder_input_output_embed=True,
        rotary=True,
    )


@register_model_architecture(MODEL, "lm_base")
def lm_base() -> TransformerConfig:
    """The base decoder of TorchScale's language-modelling example."""
    return TransformerConfig(
        decoder_embed_dim=512,
        decoder_attention_heads=8,
        decoder_ffn_embed_dim=2048,
        decoder_layers=6,
        decoder_normalize_before=True,
        activation_fn="relu",
        dropout=0.1,
        no_scale_embedding=False,
    )


@register_model_architecture(MODEL, "gpt_base")
def gpt_base() -> TransformerConfig:
    """``lm_base`` as TorchScale's documented command trains it: GELU, tied embeddings."""
    return lm_base().replace(
        activation_fn="gelu", attention_dropout=0.1, share_decoder_input_output_embed=True
    )


def opt(*, layers: int, dim: int, heads: int) -> TransformerConfig:
    """A size of OPT (Zhang et al. 2022, arXiv:2205.01068, table 1).

    All sizes norm before each branch and have an embedding as wide as the model; the published
    350M model does neither.
    """
    return TransformerConfig(
        decoder_embed_dim=dim,
        decoder_attention_heads=heads,
        decoder_ffn_embed_dim=4 * dim,
        decoder_layers=layers,
        decoder_normalize_before=True,
        activation_fn="relu",
        dropout=0.1,
        no_emb_dropout=True,
        attention_dropout=0.1,
        share_decoder_input_output_embed=True,
        decoder_learned_pos=True,
        max_target_positions=2048,
        init="megatron",
    )


OPT_SIZES = {
    "opt_125m": (12, 768, 12),
    "opt_350m": (24, 1024, 16),
    "opt_760m": (24, 1536, 16),
    "opt_1.3b": (24, 2048, 32),
    "opt_2.7b": (32, 2560, 32),
    "opt_6.7b": (32, 4096, 32),
    "opt_13b": (40, 5120, 40),
    "opt_30b": (48, 7168, 56),
    "opt_66b": (64, 9216, 72),
    "opt_175b": (96, 12288, 96),
}
"""Layers, width, heads."""

for _name, (_layers, _dim, _heads) in OPT_SIZES.items():
    register_model_architecture(MODEL, _name)(partial(opt, layers=_layers, dim=_dim, heads=_heads))
