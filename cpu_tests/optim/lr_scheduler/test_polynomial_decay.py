import math

import pytest

from scalerun.dataclass.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "points"),
    [
        ({"end_learning_rate": 0.01}, {10: 0.05, 20: 0.1, 35: 0.055, 50: 0.01, 99: 0.01}),
        ({"power": 2.0}, {35: 0.025, 50: 0.0}),
        (
            {"end_learning_rate": 0.01, "zero_lr_warmup_steps": 10},
            {0: 0, 5: 0, 10: 0, 20: 0.05, 30: 0.1, 40: 0.055, 50: 0.01},
        ),
    ],
)
def test_reference_values(schedule, settings, points):
    made = schedule("polynomial_decay", lr=0.1, warmup_updates=20, total_num_update=50, **settings)
    for t, expected in points.items():
        assert made.lr_at(t) == pytest.approx(expected)


def test_the_end_is_the_end_of_the_run_unless_given(schedule):
    made = schedule("polynomial_decay", lr=1.0, max_update=10)
    assert [made.lr_at(t) for t in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    made = schedule("polynomial_decay", lr=1.0, max_update=10, total_num_update=20)
    assert made.lr_at(10) == pytest.approx(0.5)


def test_a_warm_up_may_last_to_the_end(schedule):
    made = schedule("polynomial_decay", lr=1.0, max_update=10, warmup_updates=10)
    assert made.lr_at(10) == 1.0
    assert made.lr_at(11) == 0.0


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"power": 0.0}, "--power is 0"),
        ({"power": math.nan}, "--power is nan"),
        ({"total_num_update": 0}, "--total-num-update is 0"),
        ({"zero_lr_warmup_steps": -1}, "--zero-lr-warmup-steps is -1"),
        (
            {"zero_lr_warmup_steps": 5, "warmup_updates": 6, "total_num_update": 10},
            "--warmup-updates 6 together exceed --total-num-update 10",
        ),
    ],
)
def test_settings_out_of_range_are_refused(schedule, settings, flag):
    with pytest.raises(ConfigError, match=flag):
        schedule("polynomial_decay", max_update=100, **settings)
