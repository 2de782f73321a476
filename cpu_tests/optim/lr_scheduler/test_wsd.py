import pytest

from scalerun.dataclass.errors import ConfigError


def test_it_is_a_trapezoid(schedule):
    made = schedule("wsd", max_update=100, lr=1.0, min_lr=0.2, warmup_updates=10, decay_updates=40)
    points = {0: 0.0, 5: 0.5, 10: 1.0, 60: 1.0, 80: 0.6, 100: 0.2, 500: 0.2}
    for t, expected in points.items():
        assert made.lr_at(t) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shape", "quarter", "half"),
    [("linear", 0.75, 0.5), ("sqrt", 0.5, 1 - 0.5**0.5), ("cosine", 0.8535534, 0.5)],
)
def test_the_decay_has_a_shape(schedule, shape, quarter, half):
    made = schedule("wsd", max_update=100, lr=1.0, decay_updates=40, decay_shape=shape)
    rates = [made.lr_at(t) for t in (60, 70, 80, 100)]
    assert rates == pytest.approx([1.0, quarter, half, 0.0])


def test_by_default_the_decay_takes_a_fifth(schedule):
    made = schedule("wsd", max_update=100, lr=1.0)
    assert made.lr_at(80) == 1.0
    assert made.lr_at(81) == pytest.approx(0.95)


def test_without_a_decay_it_stays(schedule):
    made = schedule("wsd", max_update=100, lr=1.0, decay_updates=0)
    assert made.lr_at(100) == made.lr_at(200) == 1.0


def test_warm_up_and_decay_must_fit_the_run(schedule):
    with pytest.raises(ConfigError, match=r"--warmup-updates 70 and a decay of 40 updates"):
        schedule("wsd", max_update=100, warmup_updates=70, decay_updates=40)
    with pytest.raises(ConfigError, match="--decay-updates is -2"):
        schedule("wsd", max_update=100, decay_updates=-2)
