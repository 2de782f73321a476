"""DeepNet (Wang et al. 2022, arXiv:2203.00555): transformers of up to a thousand layers.

The block is the plain one; its residuals are DeepNorm (:mod:`scalerun.modules.residual`): the
stream is multiplied by a constant above 1 before a branch is added and both are normed, and the
branches' weights start small. Both constants follow from the number of layers, so that an update
changes a deep model no more than a shallow one. ``--deepnorm`` makes a DeepNet of any model whose
mixer is attention.
"""

from __future__ import annotations

from scalerun.models.base_model import register_model_architecture
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_lm import MODEL, lm_base
from scalerun.models.transformer_mt import MODEL as MT_MODEL
from scalerun.models.transformer_mt import TransformerMTConfig


@register_model_architecture(MODEL, "deepnet_tiny")
def deepnet_tiny() -> TransformerConfig:
    """A hundred layers of width 32: 0.9 million parameters (264 symbols)."""
    return TransformerConfig(
        decoder_embed_dim=32,
        decoder_attention_heads=2,
        decoder_ffn_embed_dim=64,
        decoder_layers=100,
        deepnorm=True,
    )


@register_model_architecture(MODEL, "deepnet_base")
def deepnet_base() -> TransformerConfig:
    """``lm_base`` with DeepNorm, and so with a norm after each branch."""
    return lm_base().replace(decoder_normalize_before=None, deepnorm=True)


def deepnet_mt(*, layers: int, dim: int, heads: int) -> TransformerMTConfig:
    """A translation model of the paper; ``layers`` is the depth of each side."""
    return TransformerMTConfig(
        encoder_embed_dim=dim,
        encoder_attention_heads=heads,
        encoder_ffn_embed_dim=4 * dim,
        encoder_layers=layers,
        decoder_embed_dim=dim,
        decoder_attention_heads=heads,
        decoder_ffn_embed_dim=4 * dim,
        decoder_layers=layers,
        deepnorm=True,
        activation_fn="relu",
        dropout=0.1,
        no_scale_embedding=False,
        share_all_embeddings=True,
    )


@register_model_architecture(MT_MODEL, "deepnet_mt_200")
def deepnet_mt_200() -> TransformerMTConfig:
    """The paper's 100 + 100 layers: 2.9 billion parameters besides the embedding."""
    return deepnet_mt(layers=100, dim=1024, heads=16)


@register_model_architecture(MT_MODEL, "deepnet_mt_1000")
def deepnet_mt_1000() -> TransformerMTConfig:
    """The paper's 500 + 500 layers, 2,500 branches: 3.7 billion parameters and the embedding."""
    return deepnet_mt(layers=500, dim=512, heads=8)
