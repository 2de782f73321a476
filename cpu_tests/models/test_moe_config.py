from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from scalerun.dataclass.errors import ConfigError
from scalerun.models.base_model import build_model
from scalerun.models.moe_config import MOE_OPTIONS, MoEConfig
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_decoder import TransformerDecoder
from scalerun.models.xmoe import xmoe_tiny
from scalerun.modules.moe.gates import GATES
from scalerun.modules.moe.moe_layer import MoELayer
from scalerun.modules.residual import deepnorm_gain, subln_gain

MOE = {"moe_freq": 2, "moe_expert_count": 4}
TOP1 = {**MOE, "moe_top1_expert": True}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"moe_freq": -1}, "--moe-freq is -1; give 0 or more"),
    ({"moe_expert_count": -1}, "--moe-expert-count is -1; give 0 or more"),
    ({"moe_freq": 1}, "--moe-freq needs experts; give --moe-expert-count"),
    ({"moe_freq": 4, "moe_expert_count": 2}, "--moe-freq 4 gives no layer of --decoder-layers 3"),
    ({**MOE, "moe_eval_capacity_token_fraction": 1.5}, "fraction is 1.5; give a share above 0"),
    ({**MOE, "moe_eval_capacity_token_fraction": 0.0}, "fraction is 0; give a share above 0"),
    ({**MOE, "moe_eval_capacity_token_fraction": -0.5}, "fraction is -0.5; give a share above 0"),
    ({**MOE, "moe_eval_capacity_token_fraction": float("nan")}, "fraction is nan"),
    ({**MOE, "use_xmoe": True, "moe_gate": "linear"}, "--use-xmoe and --moe-gate linear exclude"),
    (
        {**MOE, "use_xmoe": True, "moe_second_expert_policy": "all"},
        "excludes --moe-second-expert-policy all; give --no-use-xmoe --moe-gate xmoe",
    ),
    (
        {**TOP1, "moe_second_expert_policy": "all"},
        "--moe-second-expert-policy all has no effect with",
    ),
    (
        {**TOP1, "moe_normalize_gate_prob_before_dropping": True},
        "--moe-normalize-gate-prob-before-dropping has no effect with",
    ),
    ({**TOP1, "moe_deterministic_eval": False}, "--no-moe-deterministic-eval has no effect with"),
    (
        {**MOE, "moe_second_expert_policy": "all", "moe_deterministic_eval": False},
        "--no-moe-deterministic-eval has no effect with --moe-second-expert-policy all",
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_makes_no_sense_is_refused_in_one_sentence(
    changes: dict[str, Any], words: str, make_config: Callable[..., TransformerConfig]
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_config(**changes).validate()
    assert "\n" not in str(caught.value)


TO_FOLLOW: list[tuple[dict[str, Any], str]] = [
    ({"moe_top1_expert": True}, "moe_normalize_gate_prob_before_dropping"),
    ({"moe_second_expert_policy": "all"}, "use_xmoe"),
    ({"moe_gate": "linear"}, "use_xmoe"),
]


@pytest.mark.parametrize(("changes", "switch"), TO_FOLLOW)
def test_the_advice_can_be_followed_where_a_preset_set_the_other_flag(
    changes: dict[str, Any], switch: str
) -> None:
    cfg = xmoe_tiny().replace(**changes)
    with pytest.raises(ConfigError, match=f"--no-{switch.replace('_', '-')}"):
        cfg.validate()
    cfg.replace(**{switch: False}).validate()


@pytest.mark.parametrize("name", [f.name for f in fields(MoEConfig) if f.name != "moe_freq"])
def test_without_layers_of_experts_no_rule_for_them_is_accepted(
    name: str, make_config: Callable[..., TransformerConfig]
) -> None:
    assert name in MOE_OPTIONS
    default = getattr(MoEConfig(), name)
    other = not default if isinstance(default, bool) else 1 if default == 0 else "all"
    flag = f"--{name.replace('_', '-')} has no effect without --moe-freq"
    with pytest.raises(ConfigError, match=flag):
        make_config(**{name: 0.5 if "fraction" in name else other}).validate()


def test_multiway_layers_have_no_experts(make_config: Callable[..., TransformerConfig]) -> None:
    cfg = make_config(**MOE)
    stack = replace(cfg.decoder_stack(), multiway=True)
    with pytest.raises(ConfigError, match="--moe-freq and --multiway exclude each other"):
        cfg.check_moe([stack])


def test_torchscales_documented_settings_are_accepted(
    make_config: Callable[..., TransformerConfig],
) -> None:
    cfg = make_config(
        **MOE,
        moe_gating_use_fp32=True,
        moe_second_expert_policy="random",
        moe_normalize_gate_prob_before_dropping=True,
        moe_eval_capacity_token_fraction=-1.0,
        use_xmoe=True,
    )
    cfg.validate()
    assert cfg.gating().normalize_before_dropping


def test_xmoe_implies_its_settings_but_not_its_gate(
    make_config: Callable[..., TransformerConfig],
) -> None:
    cfg = make_config(**MOE, use_xmoe=True)
    assert cfg.gate_name() == "xmoe"
    assert cfg.gating().normalize_before_dropping
    cosine = make_config(**MOE, use_xmoe=True, moe_gate="xmoe_cosine")
    cosine.validate()
    assert cosine.gate_name() == "xmoe_cosine"
    assert make_config(**MOE).gate_name() == "linear"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (MOE, "--expert-parallel-size 3 does not divide --moe-expert-count 4; choose a divisor"),
        (
            {},
            "--expert-parallel-size 3 has no effect without --moe-freq; add that, or leave it out",
        ),
    ],
)
def test_ranks_that_experts_cannot_be_spread_over_are_refused(
    changes: dict[str, Any], message: str, make_config: Callable[..., TransformerConfig]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**changes).check_expert_parallel(3)
    assert str(caught.value) == message


@pytest.mark.parametrize(("freq", "expected"), [(0, []), (1, [0, 1, 2]), (2, [1]), (3, [2])])
def test_every_nth_layer_has_experts(
    freq: int, expected: list[int], make_model: Callable[..., TransformerDecoder]
) -> None:
    model = make_model(moe_freq=freq, moe_expert_count=4 if freq else 0)
    found = [i for i, block in enumerate(model.blocks()) if isinstance(block.ffn, MoELayer)]
    assert found == expected


@pytest.mark.parametrize("gate", sorted(GATES))
def test_the_gate_is_the_one_that_was_chosen(
    gate: str, make_model: Callable[..., TransformerDecoder]
) -> None:
    layer = make_model(**MOE, moe_gate=gate).blocks()[1].ffn
    assert isinstance(layer, MoELayer)
    assert type(layer.router.gate) is GATES[gate]


@pytest.mark.parametrize("init", ["paper", "torchscale"])
@pytest.mark.parametrize("scheme", ["deepnorm", "subln"])
def test_the_gains_of_deepnorm_and_subln_are_the_experts_too(
    scheme: str, init: str, make_config: Callable[..., TransformerConfig]
) -> None:
    def weights(**changes: Any) -> dict[str, torch.Tensor]:
        cfg = make_config(**MOE, init=init, **changes)
        model = build_model(cfg, vocab_size=19, padding_idx=1, seed=1, device=torch.device("cpu"))
        return {
            name: tensor
            for name, tensor in model.state_dict().items()
            if ".experts." in name and "norm" not in name
        }

    gain = (deepnorm_gain if scheme == "deepnorm" else subln_gain)(3)
    plain, scaled = weights(), weights(**{scheme: True})
    assert len(plain) == 4
    for name, tensor in scaled.items():
        torch.testing.assert_close(tensor, gain * plain[name])
