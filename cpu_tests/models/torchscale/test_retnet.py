from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models.torchscale import RetNet, RetNetConfig, load_retnet
from scalerun.models.torchscale.retnet import convert_retnet_keys, retnet_config

VOCAB, DIM, VALUES, HEADS, FFN, LAYERS = 23, 32, 48, 4, 40, 3
SIZES = {
    "decoder_embed_dim": DIM,
    "decoder_value_embed_dim": VALUES,
    "decoder_retention_heads": HEADS,
    "decoder_ffn_embed_dim": FFN,
    "decoder_layers": LAYERS,
    "activation_fn": "swish",
}


State = dict[str, Tensor]


@pytest.fixture
def golden_state(golden_tensors: Callable[[dict[str, tuple[int, ...]]], State]) -> State:
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, DIM),
        "output_projection.weight": (VOCAB, DIM),
    }
    shapes["layer_norm.weight"] = (DIM,)
    for i in range(LAYERS):
        layer = f"layers.{i}"
        for name, rows, columns in (
            ("retention.q_proj", DIM, DIM),
            ("retention.k_proj", DIM, DIM),
            ("retention.v_proj", VALUES, DIM),
            ("retention.g_proj", VALUES, DIM),
            ("retention.out_proj", DIM, VALUES),
            ("ffn.fc1", FFN, DIM),
            ("ffn.gate", FFN, DIM),
            ("ffn.fc2", DIM, FFN),
        ):
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
        shapes[f"{layer}.retention_layer_norm.weight"] = (DIM,)
        shapes[f"{layer}.final_layer_norm.weight"] = (DIM,)
    return golden_tensors(shapes)


@dataclass
class Golden:
    """What TorchScale computes with the golden weights and tokens."""

    ends: list[float]
    total: float
    total_abs: float
    fields: dict[str, Any] = field(default_factory=dict)
    final_norm: bool = True
    token_by_token: bool = False


START = [0.230692, 0.526402, -0.782971]
GOLDEN = {
    "parallel": Golden([*START, 1.008059, -0.413194, -0.583658], 15.77352, 373.5692),
    "chunkwise": Golden(
        [*START, 1.008057, -0.413194, -0.583658],
        15.77352,
        373.5692,
        {"chunkwise_recurrent": True, "recurrent_chunk_size": 4},
    ),
    "recurrent": Golden(
        [0.230693, 0.526401, -0.782971, 1.008058, -0.413194, -0.583658],
        15.77352,
        373.5692,
        token_by_token=True,
    ),
    "deepnorm_post_norm": Golden(
        [0.147746, -0.711263, -0.218032, -0.127948, -0.260991, -0.310486],
        -16.20175,
        416.6654,
        {"deepnorm": True, "decoder_normalize_before": False},
        final_norm=False,
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
@torch.no_grad()
def test_logits_are_those_of_torchscale(
    name: str, golden_state: State, golden_tokens: Tensor, check_golden: Callable[..., None]
) -> None:
    golden = GOLDEN[name]
    if not golden.final_norm:
        del golden_state["layer_norm.weight"]
    model = load_retnet({**SIZES, **golden.fields}, golden_state, version="main").eval()
    if golden.token_by_token:
        state = model.init_incremental_state(2, 13)
        pieces = golden_tokens.split(1, 1)
        logits = torch.cat([model(piece, incremental_state=state).logits for piece in pieces], 1)
    else:
        logits = model(golden_tokens).logits
    check_golden(logits, golden.ends, golden.total, golden.total_abs)


def test_fields_left_out_have_torchscales_defaults() -> None:
    cfg = retnet_config(RetNetConfig(decoder_retention_heads=4), version="main")
    assert (cfg.decoder_embed_dim, cfg.decoder_value_embed_dim) == (768, 1280)
    assert (cfg.activation_fn, cfg.layernorm_eps, cfg.chunkwise_recurrent) == ("gelu", 1e-6, False)
    assert (cfg.init, cfg.norm_eps_mode) == ("torchscale", "torchscale")
    given = RetNetConfig(decoder_retention_heads=4, chunkwise_recurrent=True)
    assert retnet_config(given, version="main").recurrent_chunk_size == 512


def test_fresh_weights_are_torchscales() -> None:
    model = RetNet(RetNetConfig(**SIZES, vocab_size=11))
    assert model(torch.tensor([[3, 4, 5]])).logits.shape == (1, 3, 11)
    weight = model.state_dict()["layers.0.mixer.q_proj.weight"]
    assert weight.std().item() == pytest.approx(2**-2.5 * DIM**-0.5, rel=0.1)
    with pytest.raises(ConfigError, match="vocab_size is -1"):
        RetNet(RetNetConfig(**SIZES))


def test_the_default_sizes_of_torchscale_are_refused_as_they_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="1280 is not a multiple of --decoder-retention-heads 3"):
        retnet_config(RetNetConfig(), version="main")


@pytest.mark.parametrize(
    ("fields", "main", "release"),
    [
        ({}, "pre_norm", "pre_norm"),
        ({"deepnorm": True}, "pre_norm", "deep_norm"),
        ({"deepnorm": True, "decoder_normalize_before": False}, "deep_norm", "deep_norm"),
        ({"decoder_normalize_before": False}, "post_norm", "pre_norm"),
        ({"decoder_normalize_before": False, "subln": False}, "post_norm", "post_norm"),
    ],
)
def test_each_version_places_the_norms_as_it_does(
    fields: dict[str, Any], main: str, release: str
) -> None:
    for version, residual in (("main", main), ("0.3.0", release)):
        stack = retnet_config(RetNetConfig(**SIZES, **fields), version=version).decoder_stack()
        assert stack.axes.residual == residual
        assert stack.final_norm == (residual == "pre_norm")
        assert (stack.axes.alpha > 1) == ("deepnorm" in fields)


def test_each_version_has_its_denominators(golden_state: State, golden_tokens: Tensor) -> None:
    """They are told apart by the eps of the head norm alone."""
    fields = {**SIZES, "layernorm_eps": 1e-2}
    state = {key: 4 * value if "k_proj" in key else value for key, value in golden_state.items()}
    logits = {}
    for version in ("main", "0.3.0"):
        model = load_retnet(fields, state, version=version).eval()
        with torch.no_grad():
            logits[version] = model(golden_tokens).logits
    assert (logits["main"] - logits["0.3.0"]).abs().max().item() > 1e-4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"multiway": True}, "multiway"),
        ({"no_output_layer": True}, "no_output_layer"),
        ({"decoder_attention_heads": 4}, "no field 'decoder_attention_heads'"),
        ({"decoder_retention_heads": 3}, "must be an even width of a head"),
    ],
)
def test_other_architectures_are_refused(
    fields: dict[str, Any], words: str, golden_state: State
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_retnet({**SIZES, **fields}, golden_state, version="main")


def test_an_unknown_version_is_refused(golden_state: State) -> None:
    with pytest.raises(ConfigError, match=r"main, 0\.3\.0"):
        load_retnet(SIZES, golden_state, version="0.2")


def test_a_retnet_of_before_september_2023_is_refused_in_one_sentence(golden_state: State) -> None:
    state = {**golden_state, "layers.0.retention.q_proj.bias": torch.zeros(DIM)}
    with pytest.raises(UserError, match="before September 2023") as caught:
        load_retnet(SIZES, state, version="main")
    assert "\n" not in str(caught.value)


def test_a_state_dict_that_does_not_fit_is_refused(golden_state: State) -> None:
    state = golden_state
    missing = {key: value for key, value in state.items() if key != "layers.1.ffn.gate.weight"}
    with pytest.raises(UserError, match=r"lacks \['layers.1.ffn.gate.weight'\]"):
        load_retnet(SIZES, missing, version="main")
    with pytest.raises(UserError, match=r"layers\.0\.ffn\.fc2\.weight is"):
        load_retnet(SIZES, {**state, "layers.0.ffn.fc2.weight": torch.zeros(2, 2)}, version="main")
    with pytest.raises(UserError, match="self_attn"):
        convert_retnet_keys({"layers.0.self_attn.q_proj.weight": torch.zeros(2)})
    with pytest.raises(UserError, match="embed_tokens"):
        load_retnet(SIZES, {}, version="main")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_tables_are_checked_and_dropped(dtype: torch.dtype) -> None:
    """Of four features, each angle stands twice; the decays are log(1 - 1/32), log(1 - 1/64)."""
    tables = {
        "retnet_rel_pos.angle": torch.tensor([1.0, 1.0, 1e-4, 1e-4]),
        "retnet_rel_pos.decay": torch.tensor([-0.0317486983, -0.0157483570]),
    }
    assert convert_retnet_keys({key: table.to(dtype) for key, table in tables.items()}) == {}
    for key, table in tables.items():
        with pytest.raises(UserError, match=f"{key} is not the table"):
            convert_retnet_keys({key: table * 1.02})


def test_a_tied_projection_must_equal_the_embedding(golden_state: State) -> None:
    fields, state = {**SIZES, "share_decoder_input_output_embed": True}, golden_state
    with pytest.raises(UserError, match="they differ"):
        load_retnet(fields, state, version="main")
    state["output_projection.weight"] = state["embed_tokens.weight"].clone()
    assert load_retnet(fields, state, version="main").output_projection is None


def test_experts_are_loaded(golden_state: State, golden_tokens: Tensor) -> None:
    fields = {**SIZES, "moe_freq": 3, "moe_expert_count": 2, "subln": False}
    state = {k: v for k, v in golden_state.items() if not k.startswith("layers.2.ffn.")}
    dim, ffn = SIZES["decoder_embed_dim"], SIZES["decoder_ffn_embed_dim"]
    draw = torch.Generator().manual_seed(1)
    for j in range(2):
        for name, shape in (
            ("fc1.weight", (ffn, dim)),
            ("fc1.bias", (ffn,)),
            ("fc2.weight", (dim, ffn)),
            ("fc2.bias", (dim,)),
        ):
            key = f"layers.2.moe_layer.experts.{j}.{name}"
            state[key] = torch.randn(shape, generator=draw)
    state["layers.2.moe_layer.gate.wg.weight"] = torch.randn(2, dim, generator=draw)
    model = load_retnet(fields, state, version="main").eval()
    stacked = model.state_dict()["layers.2.ffn.experts.fc1_weight"]
    assert torch.equal(stacked[1], state["layers.2.moe_layer.experts.1.fc1.weight"])
    assert model(golden_tokens).logits.isfinite().all()
