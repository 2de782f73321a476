from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalerun.dataclass.errors import ConfigError
from scalerun.models.torchscale import (
    Decoder,
    DecoderConfig,
    Encoder,
    EncoderConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
)

SIZES: dict[str, Any] = {"vocab_size": 11}
ENCODER = {"encoder_embed_dim": 16, "encoder_attention_heads": 2, "encoder_layers": 2}
DECODER = {"decoder_embed_dim": 16, "decoder_attention_heads": 2, "decoder_layers": 2}
TOKENS = torch.tensor([[3, 4, 5]])


@pytest.mark.parametrize("positions", ["none", "learned", "sinusoidal"])
def test_models_are_built_and_called(positions: str) -> None:
    encoder = Encoder(EncoderConfig(**SIZES, **ENCODER), positions=positions)
    assert encoder(TOKENS).logits.shape == (1, 3, 11)
    decoder = Decoder(DecoderConfig(**SIZES, **DECODER), positions=positions)
    assert decoder(TOKENS).logits.shape == (1, 3, 11)
    both = EncoderDecoder(EncoderDecoderConfig(**SIZES, **ENCODER, **DECODER), positions=positions)
    assert both(TOKENS, TOKENS[:, :2]).logits.shape == (1, 2, 11)


def test_defaults_are_torchscales() -> None:
    decoder = Decoder(DecoderConfig(**SIZES, **DECODER))
    block = decoder.blocks()[0]
    assert type(block.mixer_residual).__name__ == "PreNorm"
    assert block.mixer.inner_norm is not None  # SubLN is on unless it is switched off
    assert decoder.embedding.positions is None


def test_override_takes_what_is_set_and_settles_it() -> None:
    class Arguments:
        deepnorm = True
        decoder_layers = 2
        dropout = None
        unrelated = 5

    config = DecoderConfig(dropout=0.3)
    config.override(Arguments())
    assert (config.deepnorm, config.subln) == (True, False)
    assert (config.decoder_layers, config.dropout) == (2, 0.3)


def test_a_vocabulary_is_needed() -> None:
    with pytest.raises(ConfigError, match="vocab_size is -1"):
        Decoder(DecoderConfig(**DECODER))


def test_unknown_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match="none, learned, sinusoidal"):
        Decoder(DecoderConfig(**SIZES, **DECODER), positions="rotary")


def test_bert_init_is_normal_002() -> None:
    model = Encoder(EncoderConfig(**SIZES, **ENCODER, bert_init=True, subln=False))
    weight = model.blocks()[0].mixer.q_proj.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"activation_fn": "geluu"}, "activation_fn is 'geluu'; give one of relu, gelu, swish"),
        ({"moe_second_expert_policy": "foo"}, "policy is 'foo'; give one of random, sampling, all"),
        ({"decoder_layers": "2"}, "decoder_layers is '2'; give an int"),
        ({"dropout": "much"}, "dropout is 'much'; give a float"),
        ({"subln": 1}, "subln is 1; give a bool"),
    ],
)
def test_a_value_that_a_field_cannot_have_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DecoderConfig(**fields)
    with pytest.raises(ConfigError, match=words):
        DecoderConfig.from_fields(fields)
    with pytest.raises(ConfigError, match=words):
        DecoderConfig().override(SimpleNamespace(**fields))


def test_an_unknown_field_is_refused_with_the_closest_names() -> None:
    with pytest.raises(ConfigError, match=r"no field 'activation'; did you mean activation_fn"):
        DecoderConfig.from_fields({"activation": "gelu"})
