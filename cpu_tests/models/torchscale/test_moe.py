from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.torchscale.configs import DecoderConfig, EncoderDecoderConfig
from scalerun.models.torchscale.loader import load_decoder, load_encoder
from scalerun.models.torchscale.moe import moe_settings, stack_experts
from scalerun.models.torchscale.translate import decoder_config, encoder_decoder_config
from scalerun.modules.block_context import BlockContext

StateMaker = Callable[..., dict[str, Tensor]]
MOE = {"moe_freq": 2, "moe_expert_count": 4, "moe_second_expert_policy": "all"}
TOP1 = {"moe_top1_expert": True}


@dataclass
class Golden:
    """Settings, and what TorchScale computes with them; the statistics are layer 1's."""

    fields: dict[str, Any]
    ends: list[float]
    total: float
    l_aux: float
    entropy: float
    overflow: tuple[float, float] | None = None
    side: str = "encoder"


GOLDEN = {
    "top2": Golden(
        {},
        [-0.015445, 0.392771, -1.495949, 1.545230, -0.784897, 0.686892],
        -49.86742,
        3.140745,
        0.324272,
        (65.3846, 42.3077),
    ),
    "capacity_of_training": Golden(
        {"moe_eval_capacity_token_fraction": -1.0},
        [0.052051, 0.282573, -1.430248, 1.570343, -0.794714, 0.667050],
        -52.65329,
        3.140745,
        0.324272,
        (38.4615, 3.8462),
    ),
    "normalised_before_dropping": Golden(
        {
            "moe_eval_capacity_token_fraction": -1.0,
            "moe_normalize_gate_prob_before_dropping": True,
        },
        [0.079371, 0.436301, -1.320616, 1.432099, -0.888073, 0.753622],
        -48.52863,
        3.140745,
        0.324272,
        (38.4615, 3.8462),
    ),
    "top1": Golden(
        TOP1,
        [0.025792, 0.491252, -1.370315, 1.392718, -0.896779, 0.789502],
        -50.84155,
        3.140745,
        0.324272,
    ),
    "top1_xmoe": Golden(
        {**TOP1, "use_xmoe": True},
        [-0.019579, 0.290931, -1.262186, 1.559260, -0.819163, 0.743531],
        -51.46431,
        1.304001,
        0.558115,
    ),
    "decoder": Golden(
        {},
        [-0.094817, 0.106849, -1.017163, 1.478226, -0.636802, 0.629765],
        -74.78169,
        2.254704,
        0.513221,
        (50.0, 57.6923),
        "decoder",
    ),
}


def with_experts(
    state: dict[str, Tensor], fill: Callable[..., Tensor], *, xmoe: bool = False
) -> dict[str, Tensor]:
    """The state dict with layer 1 as a mixture of four experts, and gates five times as sharp."""
    moved = {key: t for key, t in state.items() if not key.startswith("layers.1.ffn.")}
    for key, tensor in state.items():
        if key.startswith("layers.1.ffn."):
            for j in range(4):
                name = key.replace("layers.1.ffn.", f"layers.1.moe_layer.experts.{j}.")
                moved[name] = fill(name, *tensor.shape)
    gates = {"wg_reduction.weight": (16, 32), "wg": (4, 16)} if xmoe else {"wg.weight": (4, 32)}
    for name, shape in gates.items():
        key = f"layers.1.moe_layer.gate.{name}"
        moved[key] = 5.0 * fill(key, *shape)
    return moved


@pytest.mark.parametrize("name", GOLDEN)
@torch.no_grad()
def test_logits_and_statistics_are_those_of_torchscale(
    name: str,
    golden_state: StateMaker,
    fill_golden: Callable[..., Tensor],
    golden_tokens: Tensor,
    encoder_sizes: dict[str, int],
    decoder_sizes: dict[str, int],
    check_golden: Callable[..., None],
) -> None:
    golden = GOLDEN[name]
    load, sizes = load_decoder, decoder_sizes
    if golden.side == "encoder":
        load, sizes = load_encoder, encoder_sizes  # type: ignore[assignment]
    state = with_experts(
        golden_state(side=golden.side), fill_golden, xmoe="use_xmoe" in golden.fields
    )
    model = load(sizes | MOE | golden.fields, state, version="main").eval()
    output = model(golden_tokens)
    check_golden(output.logits, golden.ends, golden.total, None)
    (report,) = output.reports
    assert report.loss.item() == pytest.approx(golden.l_aux, abs=2e-6)
    assert report.stats["entropy_gating"].item() == pytest.approx(golden.entropy, abs=2e-6)
    if golden.overflow is not None:
        for k, percentage in enumerate(golden.overflow, start=1):
            found = report.stats[f"overflow_expert{k}"].item()
            assert found == pytest.approx(percentage, abs=1e-4)


def test_evaluation_draws_one_number_for_each_token_as_torchscale_does(
    golden_state: StateMaker,
    fill_golden: Callable[..., Tensor],
    decoder_sizes: dict[str, int],
) -> None:
    state = with_experts(golden_state(side="decoder"), fill_golden)
    fields = decoder_sizes | MOE | {"moe_second_expert_policy": "random"}
    model = load_decoder(fields, state, version="main").eval()
    layer, x = model.blocks()[1].ffn, torch.randn(2, 13, 32)
    torch.manual_seed(3)
    layer(x, BlockContext())
    after = torch.get_rng_state()
    torch.manual_seed(3)
    torch.rand(26)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_side_without_enough_layers_has_no_experts() -> None:
    given = EncoderDecoderConfig(
        encoder_layers=2, decoder_layers=6, moe_freq=4, moe_expert_count=2, vocab_size=9
    )
    cfg = encoder_decoder_config(given, version="main")
    assert [cfg.is_moe_layer(layer) for layer in range(6)] == [False] * 3 + [True, False, False]
    assert moe_settings(DecoderConfig(moe_freq=13, moe_expert_count=2)) == {}


def test_xmoe_has_its_implied_settings_in_ours() -> None:
    given = DecoderConfig(moe_freq=2, moe_expert_count=2, use_xmoe=True)
    cfg = decoder_config(given, version="main")
    assert cfg.gate_name() == "xmoe"
    assert cfg.gating().normalize_before_dropping
    assert not cfg.gating().deterministic_eval


def test_experts_are_stacked_by_number_and_not_by_spelling() -> None:
    keys = [f"layers.1.moe_layer.experts.{j}.fc1.bias" for j in (10, 2, 0, 1, *range(3, 10))]
    numbers = [10, 2, 0, 1, *range(3, 10)]
    state = {key: torch.full((2,), j) for key, j in zip(keys, numbers, strict=True)}
    rest, stacked = stack_experts({**state, "layers.0.ffn.fc1.bias": torch.zeros(2)})
    assert list(rest) == ["layers.0.ffn.fc1.bias"]
    assert stacked["layers.1.ffn.experts.fc1_bias"][:, 0].tolist() == list(range(11))


def test_a_missing_expert_is_an_error() -> None:
    key = "layers.1.moe_layer.experts.{}.fc1.bias"
    with pytest.raises(UserError, match="experts of layers.1.ffn.experts.fc1_bias are not all"):
        stack_experts({key.format(0): torch.zeros(2), key.format(2): torch.zeros(2)})


@pytest.mark.parametrize(("theirs", "ours"), [(0.25, 0.25), (0.0, -1.0), (-0.5, -1.0)])
def test_a_share_that_is_not_above_0_is_the_capacity_of_training(
    theirs: float, ours: float
) -> None:
    given = DecoderConfig(**MOE, moe_eval_capacity_token_fraction=theirs)
    cfg = decoder_config(given, version="main")
    assert cfg.moe_eval_capacity_token_fraction == ours
