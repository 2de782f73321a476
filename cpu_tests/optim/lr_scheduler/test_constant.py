import pytest


def test_it_warms_up_and_stays(schedule):
    made = schedule("constant", lr=0.5, warmup_updates=10, warmup_init_lr=0.1)
    assert [made.lr_at(t) for t in (0, 5, 10, 10**9)] == pytest.approx([0.1, 0.3, 0.5, 0.5])


def test_without_a_warm_up_it_is_the_rate_throughout(schedule):
    made = schedule("constant", lr=0.5)
    assert {made.lr_at(t) for t in range(100)} == {0.5}
