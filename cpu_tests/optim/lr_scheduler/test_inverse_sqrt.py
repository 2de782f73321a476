import math

import pytest


def test_after_the_warm_up_it_falls_with_the_root(schedule):
    made = schedule("inverse_sqrt", lr=0.5, warmup_updates=16)
    assert [made.lr_at(t) for t in (0, 4, 8, 16)] == [0.0, 0.125, 0.25, 0.5]
    assert made.lr_at(64) == pytest.approx(0.25)
    for t in range(16, 200):
        assert made.lr_at(t) == pytest.approx(0.5 * math.sqrt(16 / t))


def test_without_a_warm_up_it_starts_at_the_peak(schedule):
    made = schedule("inverse_sqrt", lr=0.5, warmup_updates=0)
    assert made.lr_at(0) == made.lr_at(1) == 0.5
    assert made.lr_at(4) == 0.25


def test_the_warm_up_may_start_above_zero(schedule):
    made = schedule("inverse_sqrt", lr=0.5, warmup_updates=10, warmup_init_lr=0.1)
    assert made.lr_at(0) == 0.1
    assert made.lr_at(5) == pytest.approx(0.3)
