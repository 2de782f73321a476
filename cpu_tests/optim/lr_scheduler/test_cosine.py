import math

import pytest
import torch
from torch import nn

from scalerun.dataclass.errors import ConfigError


@pytest.mark.parametrize(
    ("t", "expected"),
    [
        (0, 0.1),
        (5, 0.55),
        (10, 1.0),
        (35, 0.8682),
        (60, 0.55),
        (109, 0.1002),
        (110, 0.1),
        (999, 0.1),
    ],
)
def test_reference_values(schedule, t, expected):
    made = schedule("cosine", max_update=110, lr=1.0, min_lr=0.1, warmup_updates=10)
    assert made.lr_at(t) == pytest.approx(expected, abs=5e-5)


def test_without_warm_up_it_is_torchs_annealing(schedule):
    made = schedule("cosine", max_update=50, lr=0.3, min_lr=0.01)
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=50, eta_min=0.01)
    for t in range(51):
        assert made.lr_at(t) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        sgd.step()
        theirs.step()


@pytest.mark.parametrize("t_mult", [1, 2, 3])
def test_restarts_without_shrinking_are_torchs_warm_restarts(schedule, t_mult):
    made = schedule(
        "cosine", lr=0.3, min_lr=0.01, lr_period_updates=7, t_mult=float(t_mult), lr_shrink=1.0
    )
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        sgd, T_0=7, T_mult=t_mult, eta_min=0.01
    )
    for t in range(100):
        assert made.lr_at(t) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        sgd.step()
        theirs.step()


def test_each_restart_begins_lower_and_none_goes_below_the_floor(schedule):
    made = schedule("cosine", lr=1.0, min_lr=0.05, lr_period_updates=10, lr_shrink=0.5)
    assert [made.lr_at(t) for t in (0, 10, 20, 30)] == pytest.approx([1, 0.5, 0.25, 0.125])
    assert made.lr_at(100) == 0.05
    assert min(made.lr_at(t) for t in range(200)) >= 0.05


def test_a_period_may_grow_by_a_fraction(schedule):
    made = schedule("cosine", lr=1.0, lr_period_updates=10, t_mult=1.5, lr_shrink=1.0)
    assert made.locate(9) == (0, 9, 10)
    assert made.locate(10) == (1, 0, 15)
    assert made.locate(25) == (2, 0, 22.5)
    assert made.lr_at(25) == 1.0


def test_the_warm_up_may_start_elsewhere(schedule):
    made = schedule("cosine", max_update=100, lr=1.0, warmup_updates=10, warmup_init_lr=0.5)
    assert [made.lr_at(t) for t in (0, 5, 10)] == pytest.approx([0.5, 0.75, 1.0])


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"lr_period_updates": 0}, "--lr-period-updates is 0"),
        ({"t_mult": 0.5}, "--t-mult is 0.5"),
        ({"t_mult": math.nan}, "--t-mult is nan"),
        ({"lr_shrink": 0.0}, "--lr-shrink is 0"),
        ({"lr_shrink": 1.5}, "--lr-shrink is 1.5"),
        ({"warmup_updates": 100}, "--warmup-updates 100 leaves nothing"),
    ],
)
def test_settings_out_of_range_are_refused(schedule, settings, flag):
    with pytest.raises(ConfigError, match=flag):
        schedule("cosine", max_update=100, **settings)
