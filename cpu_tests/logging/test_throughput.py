import json

import pytest
import torch

from scalerun.dataclass.errors import UserError
from scalerun.logging.throughput import Throughput, measure_matmul_rate, peak_memory

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock: Clock, **kwargs: float) -> Throughput:
    return Throughput(CPU, clock=clock, **kwargs)  # type: ignore[arg-type]


def test_rates_and_sizes_of_an_interval(clock: Clock) -> None:
    speed = make(clock)
    speed.start()
    for tokens, sequences in ((100, 4), (50, 2)):
        clock.now += 2
        speed.update(tokens, sequences)
    record = speed.flush()
    assert record["wps"] == 150 / 4
    assert record["ups"] == 2 / 4
    assert record["wpb"] == 75
    assert record["bsz"] == 3
    assert record["tokens_seen"] == 150
    assert record["train_wall"] == 4
    clock.now += 1
    speed.update(10, 1)
    record = speed.flush()
    assert (record["wps"], record["tokens_seen"], record["train_wall"]) == (10, 160, 5)


def test_pauses_belong_to_no_update(clock: Clock) -> None:
    speed = make(clock)
    speed.start()
    clock.now += 1
    speed.update(10, 1)
    with speed.pause(), speed.pause():
        clock.now += 1000
    clock.now += 1
    speed.update(10, 1)
    assert speed.flush()["wps"] == 10
    assert speed.train_wall == 2


def test_a_pause_before_the_start_does_not_start_the_clock(clock: Clock) -> None:
    speed = make(clock)
    with speed.pause():
        clock.now += 5
    clock.now += 5
    assert speed.train_wall == 0


def test_a_pause_ends_when_its_body_raises(clock: Clock) -> None:
    speed = make(clock)
    speed.start()
    with pytest.raises(KeyError), speed.pause():
        raise KeyError
    clock.now += 3
    assert speed.train_wall == 3


def test_flops_are_those_of_the_model_per_device(clock: Clock) -> None:
    speed = make(clock, flops_per_token=10**12, matmul_rate=50e12, num_devices=2)
    speed.start()
    clock.now += 4
    speed.update(80, 1)
    record = speed.flush()
    assert record["tflops"] == 10
    assert record["mfu"] == 0.2


def test_what_is_unknown_is_left_out(clock: Clock) -> None:
    assert not {"tflops", "mfu"} & set(make(clock).flush())
    assert "mfu" not in make(clock, flops_per_token=1).flush()


def test_an_empty_interval_has_zero_rates(clock: Clock) -> None:
    record = make(clock).flush()
    assert (record["wps"], record["ups"], record["wpb"], record["bsz"]) == (0, 0, 0, 0)


def test_a_restart_goes_on_counting(clock: Clock) -> None:
    straight, before, after = make(clock), make(clock), make(clock)
    for speed in (straight, before):
        speed.start()
    clock.now += 1
    straight.update(10, 1)
    before.update(10, 1)
    state = json.loads(json.dumps(before.state_dict()))
    clock.now += 1
    straight.update(30, 3)
    after.load_state_dict(state)
    clock.now += 50
    after.start()
    clock.now += 1
    after.update(30, 3)
    names = ["wpb", "bsz", "tokens_seen", "train_wall", "wps"]
    one, other = after.flush(), Throughput(CPU, clock=clock)
    assert [one[name] for name in names] == [20, 2, 40, 2, 20]
    other.load_state_dict(straight.state_dict())
    assert other.tokens_seen == straight.tokens_seen == 40


@pytest.mark.parametrize("state", [{}, {"tokens_seen": "many"}])
def test_an_unreadable_state_names_the_flag(clock: Clock, state: dict[str, object]) -> None:
    with pytest.raises(UserError, match="--reset-meters"):
        make(clock).load_state_dict(state)  # type: ignore[arg-type]


def test_the_matmul_rate_is_plausible_and_touches_no_generator() -> None:
    before = torch.get_rng_state()
    rate = measure_matmul_rate(CPU, torch.float32, budget_seconds=0.0)
    assert 1e8 < rate < 1e14
    assert torch.equal(before, torch.get_rng_state())


def test_peak_memory_of_this_process_is_plausible() -> None:
    assert 0.05 < peak_memory(CPU)["peak_memory_gib"] < 1000
