import math

import pytest

import scalerun.optim.lr_scheduler  # noqa: F401
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.optim.lr_scheduler.base_lr_scheduler import LR_SCHEDULER_REGISTRY

NAMES = ["constant", "cosine", "inverse_sqrt", "polynomial_decay", "wsd"]


def test_all_schedules_are_registered():
    assert set(NAMES) <= set(LR_SCHEDULER_REGISTRY.names())


@pytest.mark.parametrize("name", NAMES)
def test_the_rate_is_a_pure_function_and_step_update_sets_it(schedule, name):
    made = schedule(name, max_update=100, lr=0.5, warmup_updates=7)
    rates = [made.lr_at(t) for t in range(120)]
    for t in (119, 3, 50, 0, 100):
        assert made.step_update(t) == made.optimizer.get_lr() == rates[t] == made.lr_at(t)


@pytest.mark.parametrize("name", NAMES)
def test_a_new_schedule_has_set_the_first_rate(schedule, name):
    made = schedule(name, max_update=100, lr=0.5, warmup_updates=0)
    assert made.optimizer.get_lr() == made.lr_at(0) == 0.5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup_updates", [0, 1, 10])
def test_rates_stay_between_zero_and_the_peak_which_ends_the_warm_up(
    schedule, name, warmup_updates
):
    made = schedule(name, max_update=100, lr=0.5, warmup_updates=warmup_updates)
    rates = [made.lr_at(t) for t in range(200)]
    assert all(0 <= rate <= 0.5 for rate in rates)
    assert rates[warmup_updates] == 0.5
    assert rates[:warmup_updates] == sorted(rates[:warmup_updates])
    assert rates[warmup_updates:] == sorted(rates[warmup_updates:], reverse=True)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_needs_to_be_saved_but_the_number_of_updates(schedule, name):
    made = schedule(name, max_update=100)
    assert made.state_dict() == {}
    made.load_state_dict({})
    with pytest.raises(UserError, match=r"\(best\).*--reset-lr-scheduler"):
        made.load_state_dict({"best": 1.0})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_that_is_not_above_zero_is_refused(schedule, name, lr):
    with pytest.raises(ConfigError, match=f"--lr is {lr:g}; give a learning rate above 0"):
        schedule(name, max_update=100, lr=lr)


@pytest.mark.parametrize("name", NAMES)
def test_a_negative_warm_up_is_refused(schedule, name):
    with pytest.raises(ConfigError, match="--warmup-updates is -5"):
        schedule(name, max_update=100, warmup_updates=-5)


@pytest.mark.parametrize(
    ("name", "alternative"),
    [
        ("cosine", " or --lr-period-updates"),
        ("polynomial_decay", " or --total-num-update"),
        ("wsd", ""),
    ],
)
def test_a_schedule_that_needs_its_length_says_so(schedule, name, alternative):
    expected = f"--lr-scheduler {name} needs to know its length: give --max-update{alternative}$"
    with pytest.raises(ConfigError, match=expected):
        schedule(name, max_update=0)


@pytest.mark.parametrize("name", ["cosine", "polynomial_decay", "wsd"])
def test_a_warm_up_longer_than_the_run_is_refused(schedule, name):
    with pytest.raises(ConfigError, match=r"--warmup-updates 101 .*--max-update 100.*; lower"):
        schedule(name, max_update=100, warmup_updates=101)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("cosine", "min_lr"),
        ("cosine", "warmup_init_lr"),
        ("inverse_sqrt", "warmup_init_lr"),
        ("constant", "warmup_init_lr"),
        ("polynomial_decay", "end_learning_rate"),
        ("wsd", "min_lr"),
        ("wsd", "warmup_init_lr"),
    ],
)
def test_a_floor_or_start_above_the_peak_is_refused(schedule, name, setting):
    flag = "--" + setting.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} 0.2 is above --lr 0.1; lower {flag}"):
        schedule(name, max_update=100, lr=0.1, **{setting: 0.2})
    with pytest.raises(ConfigError, match=f"{flag} is nan"):
        schedule(name, max_update=100, lr=0.1, **{setting: math.nan})
