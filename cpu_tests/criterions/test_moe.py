from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalerun.criterions.base_criterion import build_criterion
from scalerun.criterions.cross_entropy import CrossEntropyConfig
from scalerun.criterions.moe import MoECrossEntropyConfig
from scalerun.data.batch import IGNORE_INDEX, Batch
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models.base_decoder import DecoderOutput
from scalerun.models.base_model import build_model
from scalerun.models.transformer_lm import lm_tiny
from scalerun.models.xmoe import xmoe_tiny
from scalerun.modules.auxiliary import Auxiliary
from scalerun.modules.per_token import PerToken


class Experts(nn.Module):
    """Constant logits, and layers that report what they are told to."""

    def __init__(self, *losses: float) -> None:
        super().__init__()
        self.losses = nn.ParameterList(torch.tensor(loss) for loss in losses)

    def forward(self, tokens_BT: Tensor, **_: Any) -> DecoderOutput:
        loads = (torch.tensor([0.25, 0.75]), torch.tensor([0.5, 0.5]))
        reports = [
            Auxiliary(loss * 1.0, {"entropy_gating": loss.detach(), "expert_load": load})
            for loss, load in zip(self.losses, loads, strict=False)
        ]
        return DecoderOutput(torch.zeros(*tokens_BT.shape, 4), tuple(reports))


def batch_of(num_targets: int) -> Batch:
    targets = torch.full((1, 5), IGNORE_INDEX)
    targets[0, :num_targets] = 2
    return Batch(
        tokens=targets.clamp(min=0), targets=targets, num_targets=num_targets, sample_ids=[0]
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0.01 * 5.0),
        ({"moe_gate_loss_wt": 2.0}, 10.0),
        ({"moe_gate_loss_wt": 2.0, "moe_gate_loss_combine_method": "average"}, 5.0),
        ({"moe_gate_loss_wt": 1.0, "moe_gate_loss_transform": "neg_log"}, -math.log(5.0)),
        (
            {
                "moe_gate_loss_wt": 1.0,
                "moe_gate_loss_transform": "neg_log",
                "moe_gate_loss_combine_method": "average",
            },
            -math.log(2.5),
        ),
    ],
)
def test_the_gate_loss_is_combined_transformed_and_weighted(
    settings: dict[str, Any], expected: float
) -> None:
    criterion = build_criterion(MoECrossEntropyConfig(**settings).named("moe_cross_entropy"))
    output = criterion(Experts(2.0, 3.0), batch_of(3))
    assert output.aux_loss.item() == pytest.approx(expected)
    assert output.aux_loss.requires_grad


@pytest.mark.parametrize("transform", ["none", "neg_log"])
def test_nothing_but_padding_costs_nothing(transform: str) -> None:
    model, cfg = Experts(0.0, 0.0), MoECrossEntropyConfig(moe_gate_loss_transform=transform)
    output = build_criterion(cfg)(model, batch_of(0))
    loss, weight = output.stats["moe_gate_loss"]
    assert weight * loss == 0
    (output.num_targets * output.aux_loss).backward()
    assert all(parameter.grad == 0 for parameter in model.losses)


def test_the_loss_is_that_of_the_targets_alone() -> None:
    model, batch = Experts(2.0, 3.0), batch_of(3)
    output = build_criterion(MoECrossEntropyConfig())(model, batch)
    plain = build_criterion(CrossEntropyConfig()).eval()(model, batch)
    assert output.loss_sum == plain.loss_sum
    assert output.loss_sum.item() == pytest.approx(3 * math.log(4))


def test_what_the_layers_report_is_logged_beside_it() -> None:
    stats = build_criterion(MoECrossEntropyConfig())(Experts(2.0, 3.0), batch_of(3)).stats
    loss, weight = stats["moe_gate_loss"]
    assert (loss.item(), weight) == (5.0, 3.0)
    assert not loss.requires_grad
    assert stats["entropy_gating"].item() == 2.5
    assert stats["expert_load"].tolist() == [[0.25, 0.75], [0.5, 0.5]]


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UserError, match="needs a model with experts; give --moe-freq"):
        build_criterion(MoECrossEntropyConfig())(Experts(), batch_of(3))


def test_a_loss_and_a_model_that_do_not_fit_are_refused_before_they_compute() -> None:
    cpu = torch.device("cpu")
    dense, experts = (
        build_model(cfg, vocab_size=9, padding_idx=None, seed=1, device=cpu)
        for cfg in (lm_tiny(), xmoe_tiny())
    )
    plain, gated = build_criterion(CrossEntropyConfig()), build_criterion(MoECrossEntropyConfig())
    plain.check_model(dense)
    gated.check_model(experts)
    with pytest.raises(ConfigError, match="give --criterion moe_cross_entropy"):
        plain.check_model(experts)
    with pytest.raises(ConfigError, match="needs a model with experts"):
        gated.check_model(dense)


def test_a_layer_that_does_not_say_whether_it_has_a_loss_is_not_refused() -> None:
    class Unknown(PerToken):
        def forward(self, x_BTD: torch.Tensor, context: Any) -> Any:
            return x_BTD, None

        def num_active_weights(self) -> int:
            return 0

    for cfg in (CrossEntropyConfig(), MoECrossEntropyConfig()):
        build_criterion(cfg).check_model(Unknown())


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match="--moe-gate-loss-wt is"):
        MoECrossEntropyConfig(moe_gate_loss_wt=weight).validate()


EXPERTS = ["--moe-freq", "2", "--moe-expert-count", "4", "--use-xmoe"]
GATED = [*EXPERTS, "--criterion", "moe_cross_entropy", "--max-update", "4"]


def test_a_run_logs_the_load_of_every_expert(undisturbed: Any, records: Any) -> None:
    folder = undisturbed("experts", [*GATED, "--log-interval", "2", "--save-interval-updates", "3"])
    for record in records(folder, "train"):
        (load,) = record["expert_load"]
        assert len(load) == 4
        assert sum(load) == pytest.approx(1.0)
        assert record["moe_gate_loss"] > 0.9
        assert 0 < record["entropy_gating"] <= math.log(4)
    plain = undisturbed("dense", ["--max-update", "4"])
    for one, other in zip(records(folder, "valid"), records(plain, "valid"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.1)


def test_a_run_with_experts_resumes_to_the_bit(
    undisturbed: Any, records: Any, run: Any, corpus: Any, tiny: list[str], tmp_path: Any
) -> None:
    straight = undisturbed("straight_experts", [*GATED, "--log-interval", "4"])
    words = [
        *tiny,
        *GATED,
        "--log-interval",
        "4",
        "--save-dir",
        "run",
        "--save-interval-updates",
        "2",
    ]
    assert run("train", corpus, *words, "--stop-time-hours", "1e-9").code == 0
    assert run("train", corpus, *words).code == 0
    (expected,), (found,) = (records(f, "train")[-1:] for f in (straight, tmp_path / "run"))
    for name in ("loss", "gnorm", "moe_gate_loss", "expert_load", "overflow_expert2"):
        assert found[name] == expected[name]


def test_training_experts_without_a_gate_loss_is_one_sentence(
    run: Any, corpus: Any, tiny: list[str]
) -> None:
    failed = run("train", corpus, *tiny, *EXPERTS, "--max-update", "1", "--save-dir", "run")
    assert failed.code == 2
    assert "give --criterion moe_cross_entropy" in failed.error
