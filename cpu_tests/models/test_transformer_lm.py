from __future__ import annotations

import pytest
import torch

from scalerun.models.base_model import ARCH_REGISTRY
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_lm import OPT_SIZES, TransformerLM, gpt_base, lm_base

OPT_VOCAB = 50272
PUBLISHED = {
    "opt_125m": 125_239_296,
    "opt_1.3b": 1_315_758_080,
    "opt_2.7b": 2_651_596_800,
    "opt_6.7b": 6_658_473_984,
    "opt_13b": 12_853_473_280,
}


def on_meta(arch: str, vocab_size: int) -> TransformerLM:
    cfg = ARCH_REGISTRY.config_for(arch)
    cfg.validate()
    with torch.device("meta"):
        return TransformerLM.build_model(cfg, vocab_size=vocab_size, padding_idx=1)


def num_parameters(arch: str, vocab_size: int) -> int:
    return sum(parameter.numel() for parameter in on_meta(arch, vocab_size).parameters())


@pytest.mark.parametrize("arch", OPT_SIZES)
def test_opt_sizes_have_the_published_number_of_parameters(arch: str) -> None:
    layers, dim, _ = OPT_SIZES[arch]
    counted = num_parameters(arch, OPT_VOCAB)
    assert counted == (OPT_VOCAB + 2050) * dim + layers * (12 * dim**2 + 13 * dim) + 2 * dim
    if arch in PUBLISHED:
        assert counted == PUBLISHED[arch]
    number, unit = arch.removeprefix("opt_")[:-1], arch[-1]
    nominal = float(number) * {"m": 1e6, "b": 1e9}[unit]
    assert counted == pytest.approx(nominal, rel=0.05)


def test_lm_tiny_has_about_a_million_parameters() -> None:
    assert num_parameters("lm_tiny", 264) == pytest.approx(1e6, rel=0.2)
    assert num_parameters("lm_tiny", 2048) == pytest.approx(1e6, rel=0.2)


def test_lm_base_is_the_base_decoder_of_torchscale() -> None:
    cfg = ARCH_REGISTRY.config_for("lm_base")
    assert isinstance(cfg, TransformerConfig)
    sizes = (cfg.decoder_embed_dim, cfg.decoder_ffn_embed_dim, cfg.decoder_layers)
    assert (*sizes, cfg.decoder_attention_heads) == (512, 2048, 6, 8)
    axes = cfg.axes()
    assert (axes.residual, axes.absolute_position) == ("pre_norm", "sinusoidal")
    assert on_meta("lm_base", 100).embedding.scale == pytest.approx(512**0.5)


def test_gpt_base_is_the_base_decoder_with_what_the_documented_command_adds() -> None:
    gpt, plain = gpt_base().to_dict(), lm_base().to_dict()
    assert {name: gpt[name] for name in plain if gpt[name] != plain[name]} == {
        "activation_fn": "gelu",
        "attention_dropout": 0.1,
        "share_decoder_input_output_embed": True,
    }


@pytest.mark.parametrize("arch", ["opt_125m", "opt_175b"])
def test_opt_recipes_are_as_published(arch: str) -> None:
    cfg = ARCH_REGISTRY.config_for(arch)
    assert isinstance(cfg, TransformerConfig)
    assert (cfg.init, cfg.megatron_init_sigma, cfg.activation_fn) == ("megatron", 0.006, "relu")
    model = on_meta(arch, 8)
    assert model.max_positions() == 2048
    assert model.output_projection is None
    assert model.embedding.dropout == 0.0
    assert model.embedding.scale == 1.0


@pytest.mark.parametrize("arch", ARCH_REGISTRY.names())
def test_every_architecture_is_valid(arch: str) -> None:
    ARCH_REGISTRY.config_for(arch).validate()
