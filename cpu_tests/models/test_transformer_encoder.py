from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from scalerun.dataclass.errors import ConfigError
from scalerun.models.base_model import build_model
from scalerun.models.transformer_encoder import TransformerEncoder, TransformerEncoderConfig

VOCAB, PAD = 19, 1
SMALL: dict[str, Any] = {
    "encoder_embed_dim": 16,
    "encoder_attention_heads": 2,
    "encoder_ffn_embed_dim": 24,
    "encoder_layers": 3,
    "max_source_positions": 32,
}
Maker = Callable[..., TransformerEncoder]


def make_config(**changes: Any) -> TransformerEncoderConfig:
    return TransformerEncoderConfig(**{**SMALL, **changes})


@pytest.fixture
def make_encoder() -> Maker:
    """A small encoder over 19 symbols with every parameter in use."""

    def make(**changes: Any) -> TransformerEncoder:
        model = build_model(
            make_config(**changes),
            vocab_size=VOCAB,
            padding_idx=PAD,
            seed=1,
            device=torch.device("cpu"),
        )
        assert isinstance(model, TransformerEncoder)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        return model.eval()

    return make


SCHEMES: dict[str, dict[str, Any]] = {
    "sinusoidal": {},
    "learned": {"encoder_learned_pos": True},
    "rotary": {"rotary": True},
    "xpos": {"xpos_rel_pos": True},
    "relative_bias": {"rel_pos_buckets": 8, "max_rel_pos": 12},
    "deepnorm": {"deepnorm": True},
    "subln": {"subln": True},
    "post_norm": {"encoder_normalize_before": False, "layernorm_embedding": True},
    "rms_glu": {"rms_norm": True, "glu": True},
    "dilated": {"segment_length": [4, 8], "dilated_ratio": [1, 2], "rotary": True},
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_on_either_side_changes_nothing(name: str, side: str, make_encoder: Maker) -> None:
    model = make_encoder(**SCHEMES[name])
    tokens = torch.randint(2, VOCAB, (1, 7))
    alone = model(tokens).logits
    pads = torch.full((1, 4), PAD)
    padded = torch.cat((pads, tokens) if side == "left" else (tokens, pads), dim=1)
    logits = model(padded, padding_mask_BT=padded == PAD).logits
    found = logits[:, 4:] if side == "left" else logits[:, :7]
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SCHEMES)
@torch.no_grad()
def test_every_token_sees_every_other(name: str, make_encoder: Maker) -> None:
    model = make_encoder(**SCHEMES[name])
    tokens = torch.randint(2, VOCAB, (1, 6))
    before = model(tokens).logits
    for place in (0, 5):
        changed = tokens.clone()
        changed[0, place] = 2 + (changed[0, place] - 1) % (VOCAB - 2)
        assert (model(changed).logits != before).any(-1).all()


@torch.no_grad()
def test_a_row_of_padding_alone_stays_finite(make_encoder: Maker) -> None:
    tokens = torch.full((2, 5), PAD)
    tokens[0] = 3
    assert make_encoder()(tokens, padding_mask_BT=tokens == PAD).logits.isfinite().all()


@torch.no_grad()
def test_token_embeddings_stand_in_for_tokens(make_encoder: Maker) -> None:
    model = make_encoder(no_scale_embedding=False)
    tokens = torch.randint(2, VOCAB, (2, 6))
    vectors = model.embedding.tokens(tokens)
    given = model(token_embeddings_BTD=vectors).features
    assert torch.equal(given, model(tokens).features)
    with pytest.raises(ValueError, match="either"):
        model(tokens, token_embeddings_BTD=vectors)
    with pytest.raises(ValueError, match="either"):
        model()


@torch.no_grad()
def test_hidden_keys_are_not_seen(make_encoder: Maker) -> None:
    model = make_encoder()
    tokens = torch.randint(2, VOCAB, (1, 6))
    hidden = torch.zeros(6, 6, dtype=torch.bool)
    hidden[:, 4] = True
    hidden[4, 4] = False
    before = model(tokens, hidden_TT=hidden).logits
    tokens[0, 4] = 2 + (tokens[0, 4] - 1) % (VOCAB - 2)
    after = model(tokens, hidden_TT=hidden).logits
    others = [0, 1, 2, 3, 5]
    torch.testing.assert_close(after[:, others], before[:, others])
    assert not torch.equal(after[:, 4], before[:, 4])


@torch.no_grad()
def test_a_tied_projection_is_the_embedding(make_encoder: Maker) -> None:
    model = make_encoder(share_encoder_input_output_embed=True)
    output = model(torch.tensor([[3, 4]]))
    assert model.output_projection is None
    assert output.logits is not None
    torch.testing.assert_close(output.logits, output.features @ model.embedding.tokens.weight.T)


def test_without_an_output_layer_there_are_features_alone(make_encoder: Maker) -> None:
    model = make_encoder(no_output_layer=True)
    output = model(torch.tensor([[3, 4]]))
    assert output.logits is None
    assert output.features.shape == (1, 2, 16)
    names = dict(model.named_parameters())
    assert "output_projection.weight" not in names


@torch.no_grad()
def test_multiway_halves_are_split_where_the_call_says(make_encoder: Maker) -> None:
    model = make_encoder(multiway=True, encoder_learned_pos=True, subln=True)
    tokens = torch.randint(2, VOCAB, (1, 8))
    first, both, second = (model(tokens, split=split).logits for split in (None, 3, 0))
    assert torch.equal(first, model(tokens, split=8).logits)
    assert torch.equal(first, model(tokens).logits)  # nothing is remembered from call to call
    assert not torch.equal(both, first)
    assert not torch.equal(both, second)


@torch.no_grad()
def test_equal_multiway_halves_are_one_layer(make_encoder: Maker) -> None:
    model = make_encoder(multiway=True, no_token_positional_embeddings=True)
    state = model.state_dict()
    model.load_state_dict({k: state[k.replace(".B.", ".A.")] for k in state})
    tokens = torch.randint(2, VOCAB, (2, 8))
    whole = model(tokens).logits
    torch.testing.assert_close(model(tokens, split=3).logits, whole, atol=1e-5, rtol=0)


def test_multiway_gradients_reach_both_halves(make_encoder: Maker) -> None:
    model = make_encoder(multiway=True, encoder_learned_pos=True).train()
    output = model(torch.randint(2, VOCAB, (2, 8)), split=3)
    assert output.logits is not None
    output.logits.logsumexp(-1).sum().backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert [name for name in unused if ".k_proj." not in name] == []


EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "encoder_embed_dim": ({}, 20),
    "encoder_attention_heads": ({}, 4),
    "encoder_ffn_embed_dim": ({}, 20),
    "encoder_layers": ({}, 2),
    "encoder_normalize_before": ({}, False),
    "normalize_output": ({}, False),
    "encoder_learned_pos": ({}, True),
    "encoder_zero_keys": ({"segment_length": [4], "dilated_ratio": [1]}, True),
    "max_source_positions": ({"encoder_learned_pos": True}, 64),
    "share_encoder_input_output_embed": ({}, True),
    "no_output_layer": ({}, True),
    "multiway": ({}, True),
    "rotary": ({}, True),
    "subln": ({}, True),
    "deepnorm": ({}, True),
    "init": ({}, "bert"),
}


def fingerprint(model: TransformerEncoder) -> list[Tensor]:
    with torch.no_grad():
        output = model(torch.arange(2, 9).unsqueeze(0))
    logits = torch.zeros(0) if output.logits is None else output.logits
    sizes = torch.tensor([p.numel() for p in model.parameters()])
    return [output.features, logits, sizes]


@pytest.mark.parametrize("name", EFFECTS)
def test_every_setting_has_an_effect(name: str, make_encoder: Maker) -> None:
    base, value = EFFECTS[name]
    before, after = (
        fingerprint(make_encoder(**base)),
        fingerprint(make_encoder(**base, **{name: value})),
    )
    equal = [a.shape == b.shape and torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert not all(equal)


def test_the_encoders_own_settings_are_all_listed_above() -> None:
    shared = {"activation_fn", "dropout"}
    own = {f.name for f in fields(TransformerEncoderConfig) if "encoder" in f.name}
    assert own <= EFFECTS.keys() | shared


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encoder_attention_heads": 3}, "--encoder-embed-dim 16 is not a multiple of"),
        ({"encoder_layers": 0}, "--encoder-layers is 0"),
        ({"max_source_positions": 0}, "--max-source-positions is 0"),
        ({"deepnorm": True, "encoder_normalize_before": True}, "remove --encoder-normalize-before"),
        ({"subln": True, "encoder_normalize_before": False}, "--no-encoder-normalize-before"),
        ({"encoder_zero_keys": True}, "--encoder-zero-keys has no effect without"),
        (
            {"no_output_layer": True, "share_encoder_input_output_embed": True},
            "--no-output-layer and --share-encoder-input-output-embed exclude",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config(**changes).validate()
