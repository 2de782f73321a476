from __future__ import annotations

import pytest
import torch

from scalerun.models.base_model import ARCH_REGISTRY, MODEL_REGISTRY
from scalerun.models.deepnet import deepnet_base
from scalerun.models.stack import Stack
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_lm import lm_base
from scalerun.models.transformer_mt import TransformerMTConfig

VOCAB = 264


def stacks_of(arch: str) -> list[Stack]:
    cfg = ARCH_REGISTRY.config_for(arch)
    assert isinstance(cfg, TransformerConfig | TransformerMTConfig)
    cfg.validate()
    return cfg.stacks()


@pytest.mark.parametrize(
    ("arch", "depth", "alpha", "gain"),
    [
        ("deepnet_tiny", 100, 200**0.25, 800**-0.25),
        ("deepnet_base", 6, 12**0.25, 48**-0.25),
    ],
)
def test_decoders_have_the_constants_of_their_depth(
    arch: str, depth: int, alpha: float, gain: float
) -> None:
    [stack] = stacks_of(arch)
    assert (stack.num_layers, stack.axes.residual) == (depth, "deep_norm")
    assert (stack.axes.alpha, stack.axes.gain) == pytest.approx((alpha, gain))


@pytest.mark.parametrize(
    ("arch", "depth", "dim", "heads"),
    [("deepnet_mt_200", 100, 1024, 16), ("deepnet_mt_1000", 500, 512, 8)],
)
def test_translation_models_have_the_constants_of_both_depths(
    arch: str, depth: int, dim: int, heads: int
) -> None:
    encoder, decoder = stacks_of(arch)
    for stack in (encoder, decoder):
        assert (stack.num_layers, stack.dim, stack.num_heads) == (depth, dim, heads)
        assert (stack.ffn_dim, stack.axes.residual) == (4 * dim, "deep_norm")
    both = (depth**4 * depth) ** (1 / 16)
    assert (encoder.axes.alpha, encoder.axes.gain) == pytest.approx((0.81 * both, 0.87 / both))
    own = (3 * depth) ** 0.25, (12 * depth) ** -0.25
    assert (decoder.axes.alpha, decoder.axes.gain) == pytest.approx(own)


@pytest.mark.parametrize(
    ("arch", "parameters"),
    [("deepnet_tiny", 0.88e6), ("deepnet_mt_200", 2.94e9), ("deepnet_mt_1000", 3.68e9)],
)
def test_presets_have_the_size_they_say(arch: str, parameters: float) -> None:
    cfg = ARCH_REGISTRY.config_for(arch)
    with torch.device("meta"):
        model = MODEL_REGISTRY.class_for(cfg).build_model(cfg, vocab_size=VOCAB, padding_idx=1)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == pytest.approx(parameters, rel=0.01)


def test_the_base_preset_differs_from_the_plain_one_in_its_residuals_only() -> None:
    deep, plain = deepnet_base().to_dict(), lm_base().to_dict()
    differing = {name for name in plain if deep[name] != plain[name]}
    assert differing == {"deepnorm", "decoder_normalize_before"}
    assert not deepnet_base().decoder_stack().final_norm
