from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models.base_model import build_model
from scalerun.models.torchscale.configs import DecoderConfig, EncoderConfig, EncoderDecoderConfig
from scalerun.models.torchscale.keys import convert_keys
from scalerun.models.torchscale.loader import (
    load_decoder,
    load_encoder,
    load_encoder_decoder,
    load_mlm,
)
from scalerun.models.torchscale.translate import decoder_config, encoder_config

StateMaker = Callable[..., dict[str, Tensor]]
Sizes = dict[str, int]


@dataclass
class Golden:
    """A configuration, and what TorchScale computes with it."""

    fields: dict[str, Any]
    ends: list[float]
    total: float
    total_abs: float
    state: dict[str, Any] = field(default_factory=dict)
    version: str = "main"


PLAIN = {"inner_norm": False}
POST = {"inner_norm": False, "final_norm": False}
ENCODERS = {
    "subln": Golden(
        {},
        [-0.033695, 0.547922, -1.464974, 1.426924, -0.618844, 0.877720],
        -71.68713,
        446.3364,
    ),
    "pre_norm": Golden(
        {"subln": False},
        [-0.501633, 0.201204, 0.156584, 1.405496, -0.288618, 1.052388],
        -80.08352,
        407.0501,
        PLAIN,
    ),
    "deepnorm": Golden(
        {"deepnorm": True},
        [-0.225869, -0.945761, 0.717314, -0.422994, -0.658469, 0.200397],
        -18.87432,
        373.8971,
        POST,
    ),
    "post_norm": Golden(
        {"subln": False, "encoder_normalize_before": False},
        [-0.081599, -0.425424, 0.788511, 0.009047, -0.387953, 0.055545],
        -71.25696,
        331.9744,
        POST,
    ),
    "xpos": Golden(
        {"xpos_rel_pos": True},
        [-0.190042, 0.833378, -1.008154, 1.491349, -0.618795, 0.881929],
        -64.76933,
        453.0066,
    ),
    "relative_bias": Golden(
        {"rel_pos_buckets": 32, "max_rel_pos": 128},
        [-0.036136, 0.623307, -1.474409, 1.390666, -0.609904, 0.922057],
        -67.46602,
        449.7799,
        {"buckets": 32},
    ),
    "short_relative_bias": Golden(
        {"rel_pos_buckets": 8, "max_rel_pos": 6},
        [-0.016082, 0.612184, -1.487639, 1.394026, -0.612898, 0.873933],
        -70.93389,
        446.6800,
        {"buckets": 8},
    ),
    "embedding": Golden(
        {"layernorm_embedding": True, "no_scale_embedding": False, "activation_fn": "relu"},
        [0.595183, -0.666625, -0.533675, -0.051303, -0.358127, -0.106513],
        -85.09298,
        455.4538,
        {"embedding_norm": True},
    ),
    "no_final_norm": Golden(
        {"normalize_output": False},
        [-0.744180, 1.991934, -2.836393, 3.217307, -1.208751, 1.168578],
        -144.79115,
        991.1140,
        {"final_norm": False},
    ),
}
MULTIWAY = Golden(
    {"multiway": True},
    [1.074214, 1.464714, -0.484505, -1.207315, -0.394777, -0.054313],
    -60.08953,
    412.0840,
    {"halves": (".A", ".B")},
)
HIDDEN = Golden(
    {},
    [-0.077329, 0.610901, -1.495327, 1.316480, -0.711787, 0.904549],
    -58.02249,
    446.3869,
)
FIRST = [-0.408626, 0.670763, -0.367036]
DECODERS = {
    "subln": Golden({}, [*FIRST, 1.429128, -0.645237, 0.755333], -71.29953, 434.0677),
    "deepnorm_pre_norm": Golden(
        {"deepnorm": True},
        [-0.131731, 0.518349, 0.590194, 0.661496, -0.162451, 0.459345],
        -56.56036,
        458.6953,
        PLAIN,
    ),
    "deepnorm_post_norm": Golden(
        {"deepnorm": True, "decoder_normalize_before": False},
        [-0.195593, -0.674336, 0.518843, -0.399762, -0.621712, 0.139588],
        -37.57004,
        367.8279,
        POST,
    ),
    "xpos": Golden(
        {"xpos_rel_pos": True}, [*FIRST, 1.491035, -0.598147, 0.837003], -65.29046, 439.5964
    ),
    "xpos_base_64": Golden(
        {"xpos_rel_pos": True, "xpos_scale_base": 64},
        [*FIRST, 1.490566, -0.588255, 0.842298],
        -64.68303,
        440.0292,
    ),
    "relative_bias": Golden(
        {"rel_pos_buckets": 32, "max_rel_pos": 128},
        [*FIRST, 1.392691, -0.649328, 0.785637],
        -69.23844,
        435.2960,
        {"buckets": 32},
    ),
}
BOTH = {
    "subln": Golden(
        {},
        [-0.592643, 0.269860, -0.188714, 0.747216, 1.051269, -0.284515],
        13.24071,
        211.1007,
    ),
    "deepnorm": Golden(
        {
            "deepnorm": True,
            "encoder_normalize_before": False,
            "decoder_normalize_before": False,
        },
        [-1.276367, 1.234901, 1.226638, -0.155107, 0.414032, -0.385728],
        8.45235,
        261.4847,
        POST,
    ),
    "relative_bias": Golden(
        {"rel_pos_buckets": 32, "max_rel_pos": 128},
        [-0.589617, 0.260429, -0.163425, 0.742490, 1.038962, -0.273068],
        15.90929,
        211.8755,
        {"buckets": 32},
    ),
}


def test_golden_weights_are_the_published_ones(golden_state: StateMaker) -> None:
    state = golden_state(side="decoder")
    tokens = state["embed_tokens.weight"].flatten()[:3]
    norm = state["layers.0.self_attn_layer_norm.weight"][:3]
    torch.testing.assert_close(tokens, torch.tensor([-0.0922771, 0.1179007, 0.1228048]))
    torch.testing.assert_close(norm, torch.tensor([0.8058128, 0.9565275, 1.1996390]))


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_encoder_logits_are_those_of_torchscale(
    name: str,
    golden_state: StateMaker,
    golden_tokens: Tensor,
    encoder_sizes: Sizes,
    check_golden: Callable[..., None],
) -> None:
    golden = ENCODERS[name]
    model = load_encoder(
        encoder_sizes | golden.fields,
        golden_state(side="encoder", **golden.state),
        version=golden.version,
    ).eval()
    padding = torch.zeros(2, 13, dtype=torch.bool)
    padding[1, -4:] = True
    logits = model(golden_tokens, padding_mask_BT=padding).logits
    check_golden(logits, golden.ends, golden.total, golden.total_abs)


@torch.no_grad()
def test_multiway_logits_are_those_of_torchscale(
    golden_state: StateMaker,
    golden_tokens: Tensor,
    encoder_sizes: Sizes,
    check_golden: Callable[..., None],
) -> None:
    state = golden_state(side="encoder", **MULTIWAY.state)
    model = load_encoder(encoder_sizes | MULTIWAY.fields, state, version="main").eval()
    padding = torch.zeros(2, 13, dtype=torch.bool)
    padding[1, -4:] = True
    vectors = state["embed_tokens.weight"][golden_tokens]
    output = model(token_embeddings_BTD=vectors, padding_mask_BT=padding, split=5)
    check_golden(output.logits, MULTIWAY.ends, MULTIWAY.total, MULTIWAY.total_abs)


@torch.no_grad()
def test_hidden_keys_are_those_of_torchscales_attention_mask(
    golden_state: StateMaker,
    golden_tokens: Tensor,
    encoder_sizes: Sizes,
    check_golden: Callable[..., None],
) -> None:
    model = load_encoder(encoder_sizes, golden_state(side="encoder"), version="main").eval()
    i, j = torch.arange(13)[:, None], torch.arange(13)[None]
    hidden = ((i**2 + 3 * j) % 7 == 0) & (i != j)
    logits = model(golden_tokens, hidden_TT=hidden).logits
    check_golden(logits, HIDDEN.ends, HIDDEN.total, HIDDEN.total_abs)


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_decoder_logits_are_those_of_torchscale(
    name: str,
    golden_state: StateMaker,
    golden_tokens: Tensor,
    decoder_sizes: Sizes,
    check_golden: Callable[..., None],
) -> None:
    golden = DECODERS[name]
    model = load_decoder(
        decoder_sizes | golden.fields,
        golden_state(side="decoder", **golden.state),
        version=golden.version,
    ).eval()
    check_golden(model(golden_tokens).logits, golden.ends, golden.total, golden.total_abs)


@pytest.mark.parametrize("name", BOTH)
@torch.no_grad()
def test_encoder_decoder_logits_are_those_of_torchscale(
    name: str,
    golden_state: StateMaker,
    golden_tokens: Tensor,
    encoder_sizes: Sizes,
    decoder_sizes: Sizes,
    check_golden: Callable[..., None],
) -> None:
    golden = BOTH[name]
    state = golden_state(prefix="encoder.", side="encoder", output=False, **golden.state)
    state |= golden_state(prefix="decoder.", side="decoder", cross=True, **golden.state)
    model = load_encoder_decoder(
        encoder_sizes | decoder_sizes | golden.fields, state, version=golden.version
    ).eval()
    logits = model(golden_tokens, golden_tokens[:, 2:11]).logits
    check_golden(logits, golden.ends, golden.total, golden.total_abs)


def residual_of(version: str, **fields: Any) -> str:
    return decoder_config(DecoderConfig(**fields), version=version).axes().residual


def test_version_0_3_0_moves_the_norms_of_deepnorm() -> None:
    assert residual_of("main", deepnorm=True) == "pre_norm"
    assert residual_of("0.3.0", deepnorm=True) == "deep_norm"
    assert residual_of("main", decoder_normalize_before=False) == "post_norm"
    assert residual_of("0.3.0", decoder_normalize_before=False) == "pre_norm"
    assert residual_of("0.3.0", subln=False, decoder_normalize_before=False) == "post_norm"


def test_deepnorm_outranks_the_default_subln() -> None:
    cfg = decoder_config(DecoderConfig(deepnorm=True, decoder_layers=3), version="main")
    assert cfg.deepnorm
    assert not cfg.axes().inner_norm
    assert cfg.axes().alpha == pytest.approx(6**0.25)


def test_a_loaded_model_is_one_that_its_own_settings_build(
    golden_state: StateMaker, golden_tokens: Tensor, decoder_sizes: Sizes
) -> None:
    given = DecoderConfig(**decoder_sizes, deepnorm=True, xpos_rel_pos=True, vocab_size=23)
    cfg = decoder_config(given, version="main", decoder_learned_pos=True, max_target_positions=38)
    built = build_model(cfg, vocab_size=23, padding_idx=None, seed=3, device=torch.device("cpu"))
    loaded = load_decoder(given, golden_state(side="decoder", inner_norm=False), version="main")
    built.load_state_dict(loaded.state_dict())
    assert torch.equal(built(golden_tokens).logits, loaded(golden_tokens).logits)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"decoder_embed_dimm": 4}, "decoder_embed_dimm"),
        ({"seq_parallel": True}, "seq_parallel"),
        ({"fsdp": True}, "fsdp"),
        ({"xpos_rel_pos": True, "rel_pos_buckets": 32, "max_rel_pos": 128}, "exclude each other"),
        ({"no_output_layer": True}, "no_output_layer"),
    ],
)
def test_what_has_no_form_here_is_refused(
    fields: dict[str, Any], words: str, decoder_sizes: Sizes
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_decoder(decoder_sizes | fields, {}, version="main")


def test_an_unknown_version_is_refused(decoder_sizes: Sizes) -> None:
    with pytest.raises(ConfigError, match=r"main, 0\.3\.0"):
        load_decoder(decoder_sizes, {}, version="0.2")


@pytest.mark.parametrize("kind", [EncoderConfig, DecoderConfig, EncoderDecoderConfig])
def test_an_unknown_field_is_refused_at_construction(kind: type[Any]) -> None:
    with pytest.raises(TypeError, match="layerz"):
        kind(layerz=3)


def test_a_state_dict_that_does_not_fit_is_refused(
    golden_state: StateMaker, decoder_sizes: Sizes
) -> None:
    state = golden_state(side="decoder")
    missing = {key: value for key, value in state.items() if "layers.1.ffn.fc1.bias" not in key}
    with pytest.raises(UserError, match=r"lacks \['layers.1.ffn.fc1.bias'\]"):
        load_decoder(decoder_sizes, missing, version="main")
    wrong = state | {"layers.0.ffn.fc2.weight": torch.zeros(2, 2)}
    with pytest.raises(UserError, match=r"layers\.0\.ffn\.fc2\.weight is"):
        load_decoder(decoder_sizes, wrong, version="main")
    with pytest.raises(UserError, match="embed_tokens"):
        load_decoder(decoder_sizes, {}, version="main")


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(UserError, match="gate"):
        convert_keys({"layers.0.mystery.gate": torch.zeros(2)})


def test_stored_xpos_tables_are_checked_and_dropped() -> None:
    right = torch.tensor([0.2857143, 0.4642857, 0.6428571, 0.8214286])
    key = "layers.0.self_attn.xpos.scale"
    assert convert_keys({key: right.half()}) == {}
    with pytest.raises(UserError, match="XPos"):
        convert_keys({key: right * 1.1})


def test_a_tied_projection_must_equal_the_embedding(
    golden_state: StateMaker, decoder_sizes: Sizes
) -> None:
    fields = decoder_sizes | {"share_decoder_input_output_embed": True}
    state = golden_state(side="decoder")
    with pytest.raises(UserError, match="differ"):
        load_decoder(fields, state, version="main")
    state["output_projection.weight"] = state["embed_tokens.weight"].clone()
    assert load_decoder(fields, state, version="main").output_projection is None


def test_all_embeddings_can_be_one(
    golden_state: StateMaker, encoder_sizes: Sizes, decoder_sizes: Sizes
) -> None:
    fields = encoder_sizes | decoder_sizes | {"share_all_embeddings": True}
    state = golden_state(prefix="encoder.", side="encoder", output=False)
    state |= golden_state(prefix="decoder.", side="decoder", cross=True)
    with pytest.raises(UserError, match="differ"):
        load_encoder_decoder(fields, state, version="main")
    table = state["encoder.embed_tokens.weight"]
    state["decoder.embed_tokens.weight"] = state["decoder.output_projection.weight"] = table
    model = load_encoder_decoder(fields, state, version="main")
    assert model.decoder.embedding.tokens.weight is model.encoder.embedding.tokens.weight
    assert model.decoder.output_projection is None


def test_a_multiway_decoder_loads_without_its_dead_halves(
    golden_state: StateMaker, golden_tokens: Tensor, decoder_sizes: Sizes
) -> None:
    state = golden_state(side="decoder")
    plain = load_decoder(decoder_sizes, state, version="main").eval()
    paired = {}
    for key, tensor in state.items():
        name, kind = key.rsplit(".", 1)
        halved = ".self_attn." in key
        paired |= (
            {f"{name}.A.{kind}": tensor, f"{name}.B.{kind}": -tensor} if halved else {key: tensor}
        )
    model = load_decoder(decoder_sizes | {"multiway": True}, paired, version="main").eval()
    assert torch.equal(model(golden_tokens).logits, plain(golden_tokens).logits)


def test_sinusoidal_positions_are_recognised_by_their_key(
    golden_state: StateMaker, decoder_sizes: Sizes
) -> None:
    state = golden_state(side="decoder")
    del state["embed_positions.weight"]
    state["embed_positions._float_tensor"] = torch.zeros(1)
    model = load_decoder(decoder_sizes | {"xpos_rel_pos": True}, state, version="main")
    assert type(model.embedding.positions).__name__ == "SinusoidalPositions"
    assert type(model.relative_position).__name__ == "XPos"


@torch.no_grad()
def test_a_masked_language_model_has_the_head_of_the_example(
    golden_state: StateMaker, golden_tokens: Tensor, encoder_sizes: Sizes
) -> None:
    state = golden_state(side="encoder", output=False)
    generator = torch.Generator().manual_seed(1)
    shapes = {"dense.weight": (32, 32), "dense.bias": (32,), "bias": (23,)}
    shapes |= {"layer_norm.weight": (32,), "layer_norm.bias": (32,)}
    head = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    state |= {f"output_projection.{key}": tensor for key, tensor in head.items()}
    table = state["embed_tokens.weight"]
    state["output_projection.weight"] = table.clone()
    fields = encoder_sizes | {"activation_fn": "relu", "layernorm_eps": 1e-3}
    bare = {key: tensor for key, tensor in state.items() if "output_projection" not in key}
    features = load_encoder(fields, bare, version="main").eval()(golden_tokens).features
    model = load_mlm(fields, state, version="main").eval()
    x = torch.relu(features.double() @ head["dense.weight"].double().T + head["dense.bias"])
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    x = x * head["layer_norm.weight"] + head["layer_norm.bias"]
    expected = x @ table.double().T + head["bias"]
    torch.testing.assert_close(model(golden_tokens).logits.double(), expected, rtol=1e-5, atol=1e-5)
    state["output_projection.weight"] += 1
    with pytest.raises(UserError, match="but they differ"):
        load_mlm(fields, state, version="main")


def test_override_of_the_old_version_places_no_norms() -> None:
    given = DecoderConfig(deepnorm=True, decoder_normalize_before=True)
    for version, residual in (
        ("0.3.0", "deep_norm"),
        ("0.3.0-override", "pre_norm"),
        ("main", "pre_norm"),
    ):
        assert decoder_config(given, version=version).decoder_stack().axes.residual == residual
    given = EncoderConfig(deepnorm=True, encoder_normalize_before=True)
    for version, residual in (
        ("0.3.0", "deep_norm"),
        ("0.3.0-override", "pre_norm"),
        ("main", "deep_norm"),
    ):
        assert encoder_config(given, version=version).encoder_stack().axes.residual == residual


def test_settings_without_effect_are_left_out() -> None:
    given = DecoderConfig(rel_pos_buckets=32, max_rel_pos=0, xpos_scale_base=64)
    cfg = decoder_config(given, version="main")
    assert (cfg.relative_position, cfg.rel_pos_buckets, cfg.xpos_scale_base) == ("none", 0, 512)
