"""LongNet (Ding et al. 2023, arXiv:2307.02486): attention whose cost is linear in the length.

The block is the plain one; its attention is cut into segments of several lengths, of which the
long ones are thinned out (:mod:`scalerun.modules.dilated_attention`). The weights have the same
names and shapes as those of dense attention. ``--segment-length`` and ``--dilated-ratio`` make a
LongNet of any model whose mixer is attention; with lengths and ratios that grow by a factor, as
here, the cost of a token does not depend on the length of its sequence.
"""

from __future__ import annotations

from scalerun.models.base_model import register_model_architecture
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_lm import MODEL


@register_model_architecture(MODEL, "longnet_tiny")
def longnet_tiny() -> TransformerConfig:
    """The size of ``lm_tiny``, for sequences of 8,192 tokens."""
    return TransformerConfig(
        decoder_embed_dim=128,
        decoder_attention_heads=4,
        decoder_ffn_embed_dim=512,
        decoder_layers=4,
        share_decoder_input_output_embed=True,
        rotary=True,
        max_target_positions=8192,
        segment_length=[256, 1024, 4096],
        dilated_ratio=[1, 4, 16],
    )


@register_model_architecture(MODEL, "longnet_base")
def longnet_base() -> TransformerConfig:
    """``lm_base`` as in TorchScale's LongNet example: sequences of 4,096 tokens, two branches."""
    return TransformerConfig(
        decoder_embed_dim=512,
        decoder_attention_heads=8,
        decoder_ffn_embed_dim=2048,
        decoder_layers=6,
        decoder_normalize_before=True,
        share_decoder_input_output_embed=True,
        activation_fn="gelu",
        dropout=0.1,
        attention_dropout=0.1,
        no_scale_embedding=False,
        max_target_positions=4096,
        segment_length=[2048, 4096],
        dilated_ratio=[1, 2],
    )
