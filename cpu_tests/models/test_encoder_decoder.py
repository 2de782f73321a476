from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from scalerun.dataclass.errors import ConfigError
from scalerun.models.base_model import ARCH_REGISTRY, build_model
from scalerun.models.transformer_mt import TransformerMT, TransformerMTConfig
from scalerun.modules.residual import (
    deepnorm_decoder_alpha,
    deepnorm_decoder_gain,
    deepnorm_encoder_alpha,
    deepnorm_encoder_gain,
    subln_decoder_gain,
    subln_encoder_gain,
)

VOCAB, PAD = 19, 1
SMALL: dict[str, Any] = {
    "encoder_embed_dim": 16,
    "encoder_attention_heads": 2,
    "encoder_ffn_embed_dim": 24,
    "encoder_layers": 2,
    "decoder_embed_dim": 16,
    "decoder_attention_heads": 4,
    "decoder_ffn_embed_dim": 20,
    "decoder_layers": 3,
    "max_source_positions": 32,
    "max_target_positions": 32,
}
Maker = Callable[..., TransformerMT]
SCHEMES: dict[str, dict[str, Any]] = {
    "sinusoidal": {},
    "learned": {"encoder_learned_pos": True, "decoder_learned_pos": True},
    "rotary": {"rotary": True},
    "xpos": {"xpos_rel_pos": True},
    "relative_bias": {"rel_pos_buckets": 8, "max_rel_pos": 12},
    "deepnorm": {"deepnorm": True},
    "subln": {"subln": True},
    "shared": {"share_all_embeddings": True},
}


@pytest.fixture
def make_model() -> Maker:
    """A small encoder-decoder over 19 symbols with every parameter in use."""

    def make(**changes: Any) -> TransformerMT:
        model = build_model(
            TransformerMTConfig(**{**SMALL, **changes}),
            vocab_size=VOCAB,
            padding_idx=PAD,
            seed=1,
            device=torch.device("cpu"),
        )
        assert isinstance(model, TransformerMT)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        return model.eval()

    return make


def symbols(*shape: int) -> torch.Tensor:
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("name", SCHEMES)
@torch.no_grad()
def test_decoding_step_by_step_equals_one_pass(name: str, make_model: Maker) -> None:
    model = make_model(**SCHEMES[name])
    source, target = symbols(2, 6), symbols(2, 9)
    source[1, -2:] = PAD
    whole = model(source, target).logits
    state = model.init_incremental_state(2, 9)
    encoded = model.encode(source).source
    found = [model.decoder(target[:, :3], incremental_state=state, source=encoded).logits]
    for t in range(3, 9):
        found.append(model.decoder(target[:, t : t + 1], incremental_state=state).logits)
    torch.testing.assert_close(torch.cat(found, dim=1), whole, atol=1e-5, rtol=0)


@torch.no_grad()
def test_reordering_takes_the_source_along(make_model: Maker) -> None:
    model = make_model()
    source, target = symbols(2, 6), symbols(2, 5)
    source[0, -3:] = PAD
    order = torch.tensor([1, 1, 0])
    state = model.init_incremental_state(2, 5)
    encoded = model.encode(source).source
    model.decoder(target[:, :4], incremental_state=state, source=encoded)
    state.reorder(order)
    last = model.decoder(target[order, 4:], incremental_state=state).logits
    whole = model(source[order], target[order]).logits
    torch.testing.assert_close(last, whole[:, 4:], atol=1e-5, rtol=0)


@torch.no_grad()
def test_hypotheses_of_one_source_change_places_without_it(make_model: Maker) -> None:
    model = make_model()
    source, target = symbols(2, 6)[[0, 0, 1]], symbols(3, 5)
    source[0:2, -3:] = PAD
    order = torch.tensor([1, 1, 2])
    state = model.init_incremental_state(3, 5)
    model(source, target[:, :4], incremental_state=state)
    kept = state.layers[0].cross.keys_BHMK
    state.reorder(order, source_moves=False)
    last = model(None, target[order, 4:], incremental_state=state).logits
    torch.testing.assert_close(last, model(source, target[order]).logits[:, 4:], atol=1e-5, rtol=0)
    assert state.layers[0].cross.keys_BHMK is kept


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_of_the_source_is_found_and_changes_nothing(
    name: str, side: str, make_model: Maker
) -> None:
    model = make_model(**SCHEMES[name])
    source, target = symbols(1, 6), symbols(1, 5)
    pads = torch.full((1, 3), PAD)
    padded = torch.cat((pads, source) if side == "left" else (source, pads), dim=1)
    torch.testing.assert_close(
        model(padded, target).logits, model(source, target).logits, atol=1e-5, rtol=0
    )


@torch.no_grad()
def test_every_target_token_sees_the_source_and_no_later_target(make_model: Maker) -> None:
    model = make_model()
    source, target = symbols(1, 6), symbols(1, 5)
    before = model(source, target).logits
    source[0, 5] = 2 + (source[0, 5] - 1) % (VOCAB - 2)
    assert (model(source, target).logits != before).any(-1).all()
    source[0, 5] = symbols(1, 6)[0, 5]
    target[0, 4] = 2 + (target[0, 4] - 1) % (VOCAB - 2)
    assert torch.equal(model(source, target).logits[:, :4], before[:, :4])


def test_all_embeddings_are_one_tensor(make_model: Maker) -> None:
    model = make_model(share_all_embeddings=True)
    assert model.decoder.embedding.tokens.weight is model.encoder.embedding.tokens.weight
    assert model.decoder.output_projection is None
    names = [name for name, _ in model.named_parameters() if "tokens" in name]
    assert names == ["encoder.embedding.tokens.weight"]


def test_constants_of_deepnorm_and_subln_are_the_papers() -> None:
    assert deepnorm_encoder_alpha(6, 6) == pytest.approx(1.417938, abs=1e-6)
    assert deepnorm_encoder_gain(6, 6) == pytest.approx(0.496989, abs=1e-6)
    assert deepnorm_decoder_alpha(6) == pytest.approx(2.059767, abs=1e-6)
    assert deepnorm_decoder_gain(6) == pytest.approx(0.343295, abs=1e-6)
    assert subln_encoder_gain(6, 6) == pytest.approx(1.547288, abs=1e-6)
    assert subln_decoder_gain(6) == pytest.approx(1.700109, abs=1e-6)


def test_the_gain_reaches_the_weights(make_model: Maker) -> None:
    def spread(name: str, **changes: Any) -> float:
        model = build_model(
            TransformerMTConfig(
                **{**SMALL, "encoder_embed_dim": 128, "decoder_embed_dim": 128}
            ).replace(**changes),
            vocab_size=VOCAB,
            padding_idx=PAD,
            seed=1,
            device=torch.device("cpu"),
        )
        return dict(model.named_parameters())[name].std().item()

    def ratio(name: str, **changes: Any) -> float:
        return spread(name, **changes) / spread(name)

    encoder, decoder = (
        "encoder.layers.0.mixer.v_proj.weight",
        "decoder.layers.0.mixer.v_proj.weight",
    )
    cross = "decoder.layers.0.cross_mixer.v_proj.weight"
    assert ratio(encoder, deepnorm=True) == pytest.approx(deepnorm_encoder_gain(2, 3), rel=1e-4)
    assert ratio(decoder, deepnorm=True) == pytest.approx(deepnorm_decoder_gain(3), rel=1e-4)
    assert ratio(cross, deepnorm=True) == pytest.approx(deepnorm_decoder_gain(3), rel=1e-4)
    assert ratio(encoder, subln=True) == pytest.approx(subln_encoder_gain(2, 3), rel=1e-4)
    assert ratio(decoder, subln=True) == pytest.approx(subln_decoder_gain(3), rel=1e-4)
    assert ratio(cross, subln=True) == pytest.approx(1.0, rel=1e-4)


def test_one_width_is_needed() -> None:
    with pytest.raises(ConfigError, match="--decoder-embed-dim 16 differ"):
        TransformerMTConfig(**{**SMALL, "encoder_embed_dim": 32}).validate()


def test_training_moves_every_parameter(make_model: Maker) -> None:
    model = make_model(rel_pos_buckets=8, max_rel_pos=12, subln=True).train()
    model(symbols(3, 7), symbols(3, 6)).logits.logsumexp(-1).sum().backward()
    still = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert [name for name in still if "k_proj.bias" not in name] == []


@pytest.mark.parametrize("arch", ["mt_base", "mt_tiny"])
def test_presets_are_valid(arch: str) -> None:
    config = ARCH_REGISTRY.config_for(arch)
    config.validate()
    assert isinstance(config, TransformerMTConfig)


@torch.no_grad()
def test_padding_of_the_target_is_not_routed_to_experts(make_model: Maker) -> None:
    model = make_model(moe_freq=1, moe_expert_count=4)
    source, target = symbols(2, 6), symbols(2, 9)
    longer = torch.nn.functional.pad(target, (0, 5), value=PAD)
    short, long = model(source, target), model(source, longer)
    torch.testing.assert_close(long.logits[:, :9], short.logits, atol=1e-5, rtol=0)
    for few, many in zip(short.reports, long.reports, strict=True):
        torch.testing.assert_close(many.loss, few.loss)
