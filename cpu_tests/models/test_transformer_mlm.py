from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from scalerun.dataclass.errors import ConfigError
from scalerun.models.base_model import ARCH_REGISTRY, build_model
from scalerun.models.transformer_mlm import (
    TransformerMLM,
    TransformerMLMConfig,
    bert_base,
    mlm_base,
)

SMALL: dict[str, Any] = {
    "encoder_embed_dim": 16,
    "encoder_attention_heads": 2,
    "encoder_ffn_embed_dim": 24,
    "encoder_layers": 2,
}


@torch.no_grad()
def test_the_head_is_dense_activation_norm_and_the_embedding_with_a_bias() -> None:
    model = build_model(
        TransformerMLMConfig(**SMALL),
        vocab_size=19,
        padding_idx=1,
        seed=1,
        device=torch.device("cpu"),
    ).eval()
    assert isinstance(model, TransformerMLM)
    head = model.head
    for parameter in head.parameters():
        parameter += 0.3 * torch.randn(parameter.shape)
    output = model(torch.randint(2, 19, (2, 6)))
    h = F.gelu(output.features @ head.dense.weight.T + head.dense.bias)
    h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    h = h * head.norm.weight + head.norm.bias
    expected = h @ model.embedding.tokens.weight.T + head.bias
    assert output.logits is not None
    torch.testing.assert_close(output.logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("arch", ["bert_base", "mlm_base", "mlm_tiny"])
def test_presets_are_valid(arch: str) -> None:
    config = ARCH_REGISTRY.config_for(arch)
    config.validate()
    assert isinstance(config, TransformerMLMConfig)


def test_the_base_preset_has_the_size_of_berts() -> None:
    config = ARCH_REGISTRY.config_for("mlm_base")
    with torch.device("meta"):
        model = TransformerMLM.build_model(config, vocab_size=30522, padding_idx=1)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    assert num_params == pytest.approx(110e6, rel=0.02)


def test_bert_base_is_the_base_encoder_with_what_the_documented_command_adds() -> None:
    bert, plain = bert_base().to_dict(), mlm_base().to_dict()
    assert {name: bert[name] for name in plain if bert[name] != plain[name]} == {
        "encoder_normalize_before": None,
        "deepnorm": True,
        "rel_pos_buckets": 32,
        "max_rel_pos": 128,
    }
    [stack] = bert_base().stacks()
    axes = stack.axes
    assert (axes.residual, axes.relative_position) == ("deep_norm", "relative_bias")
    assert axes.absolute_position == "learned"


def test_the_head_needs_the_embedding() -> None:
    with pytest.raises(ConfigError, match="--arch transformer_encoder"):
        TransformerMLMConfig(**SMALL, share_encoder_input_output_embed=False).validate()
