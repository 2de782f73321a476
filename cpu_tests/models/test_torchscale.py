from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models.torchscale import convert_config, convert_state_dict, load_decoder

VOCAB, DIM, HEADS, FFN, LAYERS, ROWS = 23, 32, 4, 48, 3, 40
SIZES = {
    "decoder_embed_dim": DIM,
    "decoder_attention_heads": HEADS,
    "decoder_ffn_embed_dim": FFN,
    "decoder_layers": LAYERS,
}


def golden_tensor(key: str, *shape: int) -> Tensor:
    """Weights as a formula of the key and the index, so that they need no file."""
    shift = sum(key.encode()) % 97
    index = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    values = 0.2 * torch.sin(0.37 * index**2 + shift)
    if len(shape) == 1 and key.endswith("weight"):
        values = values + 1
    return values.reshape(shape).float()


def golden_state(*, inner_norm: bool, final_norm: bool, buckets: int = 0) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, DIM),
        "embed_positions.weight": (ROWS, DIM),
        "output_projection.weight": (VOCAB, DIM),
    }
    norms = {"layer_norm": DIM} if final_norm else {}
    for i in range(LAYERS):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes[f"layers.{i}.self_attn.{name}.weight"] = (DIM, DIM)
            shapes[f"layers.{i}.self_attn.{name}.bias"] = (DIM,)
        shapes[f"layers.{i}.ffn.fc1.weight"] = (FFN, DIM)
        shapes[f"layers.{i}.ffn.fc1.bias"] = (FFN,)
        shapes[f"layers.{i}.ffn.fc2.weight"] = (DIM, FFN)
        shapes[f"layers.{i}.ffn.fc2.bias"] = (DIM,)
        norms[f"layers.{i}.self_attn_layer_norm"] = DIM
        norms[f"layers.{i}.final_layer_norm"] = DIM
        if inner_norm:
            norms[f"layers.{i}.self_attn.inner_attn_ln"] = DIM
            norms[f"layers.{i}.ffn.ffn_layernorm"] = FFN
    for name, width in norms.items():
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)
    if buckets:
        shapes["self_attn_relative_position.relative_attention_bias.weight"] = (buckets, HEADS)
    return {key: golden_tensor(key, *shape) for key, shape in shapes.items()}


def golden_tokens() -> Tensor:
    b, t = torch.arange(2)[:, None], torch.arange(13)[None]
    return (7 * b**2 + 3 * t**2 + 5 * t + 1) % VOCAB


@dataclass
class Golden:
    fields: dict[str, Any]
    first: list[float]
    last: list[float]
    total: float
    total_abs: float
    version: str = "main"
    state: dict[str, Any] = field(default_factory=dict)


SUBLN = {"inner_norm": True, "final_norm": True}
FIRST = [-0.408626, 0.670763, -0.367036]
GOLDEN = {
    "subln": Golden({}, FIRST, [1.429128, -0.645237, 0.755333], -71.29953, 434.0677, state=SUBLN),
    "deepnorm_pre_norm": Golden(
        {"deepnorm": True},
        [-0.131731, 0.518349, 0.590194],
        [0.661496, -0.162451, 0.459345],
        -56.56036,
        458.6953,
        state={"inner_norm": False, "final_norm": True},
    ),
    "deepnorm_post_norm": Golden(
        {"deepnorm": True, "decoder_normalize_before": False},
        [-0.195593, -0.674336, 0.518843],
        [-0.399762, -0.621712, 0.139588],
        -37.57004,
        367.8279,
        state={"inner_norm": False, "final_norm": False},
    ),
    "xpos": Golden(
        {"xpos_rel_pos": True},
        FIRST,
        [1.491035, -0.598147, 0.837003],
        -65.29046,
        439.5964,
        state=SUBLN,
    ),
    "xpos_base_64": Golden(
        {"xpos_rel_pos": True, "xpos_scale_base": 64},
        FIRST,
        [1.490566, -0.588255, 0.842298],
        -64.68303,
        440.0292,
        state=SUBLN,
    ),
    "relative_bias": Golden(
        {"rel_pos_buckets": 32, "max_rel_pos": 128},
        FIRST,
        [1.392691, -0.649328, 0.785637],
        -69.23844,
        435.2960,
        state={**SUBLN, "buckets": 32},
    ),
}


def test_golden_weights_are_the_published_ones() -> None:
    tokens = golden_tensor("embed_tokens.weight", VOCAB, DIM).flatten()[:3]
    norm = golden_tensor("layers.0.self_attn_layer_norm.weight", DIM)[:3]
    torch.testing.assert_close(tokens, torch.tensor([-0.0922771, 0.1179007, 0.1228048]))
    torch.testing.assert_close(norm, torch.tensor([0.8058128, 0.9565275, 1.1996390]))


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_are_those_of_torchscale(name: str) -> None:
    golden = GOLDEN[name]
    model = load_decoder(
        {**SIZES, **golden.fields}, golden_state(**golden.state), version=golden.version
    ).eval()
    with torch.no_grad():
        logits = model(golden_tokens()).logits
    ends = torch.cat((logits[0, 0, :3], logits[1, 8, -3:]))
    expected = torch.tensor(golden.first + golden.last)
    torch.testing.assert_close(ends, expected, atol=3e-6, rtol=0)
    assert logits.double().sum().item() == pytest.approx(golden.total, abs=1e-4)
    assert logits.double().abs().sum().item() == pytest.approx(golden.total_abs, abs=2e-4)


def test_version_0_3_0_moves_the_norms_of_deepnorm() -> None:
    fields = {**SIZES, "deepnorm": True}
    assert convert_config(fields, version="main")[1].axes.residual == "pre_norm"
    assert convert_config(fields, version="0.3.0")[1].axes.residual == "deep_norm"
    fields = {**SIZES, "subln": True, "decoder_normalize_before": False}
    assert convert_config(fields, version="main")[1].axes.residual == "post_norm"
    assert convert_config(fields, version="0.3.0")[1].axes.residual == "pre_norm"


def test_deepnorm_outranks_the_default_subln() -> None:
    cfg, stack = convert_config({**SIZES, "deepnorm": True}, version="0.3.0")
    axes = stack.axes
    assert cfg.deepnorm
    assert not cfg.subln
    assert not axes.inner_norm
    assert axes.alpha == pytest.approx((2 * LAYERS) ** 0.25)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"moe_freq": 2}, "moe_freq"),
        ({"multiway": True}, "multiway"),
        ({"segment_length": "[4,8]"}, "segment_length"),
        ({"decoder_embed_dimm": 4}, "decoder_embed_dimm"),
        ({"xpos_rel_pos": True, "rel_pos_buckets": 32, "max_rel_pos": 128}, "exclude each other"),
    ],
)
def test_other_architectures_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        convert_config({**SIZES, **fields}, version="main")


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"main, 0\.3\.0"):
        convert_config(SIZES, version="0.2")


def test_a_state_dict_that_does_not_fit_is_refused() -> None:
    state = golden_state(**SUBLN)
    missing = {key: value for key, value in state.items() if "layers.1.ffn.fc1.bias" not in key}
    with pytest.raises(UserError, match=r"lacks \['layers.1.ffn.fc1.bias'\]"):
        load_decoder(SIZES, missing, version="main")
    with pytest.raises(UserError, match=r"layers\.0\.ffn\.fc2\.weight is"):
        load_decoder(SIZES, {**state, "layers.0.ffn.fc2.weight": torch.zeros(2, 2)}, version="main")
    with pytest.raises(UserError, match="gate"):
        convert_state_dict({"layers.0.moe_layer.gate.wg": torch.zeros(2)})
    with pytest.raises(UserError, match="embed_tokens"):
        load_decoder(SIZES, {}, version="main")


def test_stored_xpos_tables_are_checked_and_dropped() -> None:
    right = torch.tensor([0.2857143, 0.4642857, 0.6428571, 0.8214286])
    key = "layers.0.self_attn.xpos.scale"
    assert convert_state_dict({key: right.half()}) == {}
    with pytest.raises(UserError, match="XPos"):
        convert_state_dict({key: right * 1.1})


def test_a_tied_projection_must_equal_the_embedding() -> None:
    fields = {**SIZES, "share_decoder_input_output_embed": True}
    state = golden_state(**SUBLN)
    with pytest.raises(UserError, match="differs"):
        load_decoder(fields, state, version="main")
    state["output_projection.weight"] = state["embed_tokens.weight"].clone()
    assert load_decoder(fields, state, version="main").output_projection is None


def test_sinusoidal_positions_are_recognised_by_their_key() -> None:
    state = golden_state(**SUBLN)
    del state["embed_positions.weight"]
    state["embed_positions._float_tensor"] = torch.zeros(1)
    model = load_decoder({**SIZES, "xpos_rel_pos": True}, state, version="main")
    assert type(model.embedding.positions).__name__ == "SinusoidalPositions"
    assert type(model.relative_position).__name__ == "XPos"
