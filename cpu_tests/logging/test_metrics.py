import json
import math
import random

import pytest
import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.logging.metrics import Metrics, bits_per_byte, perplexity


def test_a_mean_is_weighted_and_starts_again_after_a_flush() -> None:
    metrics = Metrics()
    metrics.add({"loss": (1.0, 1), "gnorm": 2.0})
    metrics.add({"loss": (torch.tensor(3.0), torch.tensor(3)), "gnorm": torch.tensor(4.0)})
    assert metrics.flush(2) == {"num_updates": 2, "loss": 2.5, "gnorm": 3.0}
    assert metrics.flush(3) == {"num_updates": 3}


def test_a_ratio_divides_the_sum_of_totals_by_the_sum_of_counts() -> None:
    metrics = Metrics()
    metrics.add_ratio("loss", torch.tensor(6.0), 2)
    metrics.add_ratio("loss", 3.0, 4)
    assert metrics.flush(1)["loss"] == 1.5


def test_set_keeps_the_last_value() -> None:
    metrics = Metrics()
    metrics.set({"lr": 1.0})
    metrics.set({"lr": torch.tensor(0.5)})
    assert metrics.flush(1)["lr"] == 0.5


def test_a_mean_over_no_weight_is_nan() -> None:
    metrics = Metrics()
    metrics.add_ratio("loss", 1.0, 0)
    assert math.isnan(metrics.flush(1)["loss"])


def test_later_changes_of_a_tensor_change_nothing() -> None:
    metrics = Metrics()
    value, setting = torch.ones((), dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    metrics.add_ratio("x", value, value)
    metrics.set({"y": setting})
    value.fill_(9)
    setting.fill_(9)
    assert metrics.flush(1) == {"num_updates": 1, "x": 1.0, "y": 1.0}


def test_a_gradient_is_not_kept_alive() -> None:
    metrics = Metrics()
    metrics.add({"loss": torch.ones((), requires_grad=True) * 2})
    assert not metrics._means["loss"][0].requires_grad  # type: ignore[union-attr]


def test_float32_values_are_summed_in_float64() -> None:
    metrics = Metrics()
    metrics.add_ratio("x", torch.tensor(2.0**24), 1)
    metrics.add_ratio("x", torch.tensor(1.0), 0)
    assert metrics.flush(1)["x"] == 2.0**24 + 1


@pytest.mark.parametrize("stop_after", range(6))
def test_a_run_that_goes_on_from_a_saved_state_reports_the_same_bits(stop_after: int) -> None:
    draws = random.Random(1)
    values = [(torch.tensor(draws.uniform(0, 9)), draws.uniform(0, 1e5)) for _ in range(6)]

    def feed(metrics: Metrics, some: list[tuple[Tensor, float]]) -> None:
        for value, weight in some:
            metrics.add({"gnorm": value, "clip": (value, weight)})
            metrics.add_ratio("loss", value * 1e4, weight)
            metrics.set({"lr": weight})

    straight, before, after = Metrics(), Metrics(), Metrics()
    feed(straight, values)
    feed(before, values[:stop_after])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    feed(after, values[stop_after:])
    assert list(after.flush(6).items()) == list(straight.flush(6).items())


def test_taking_the_state_changes_nothing() -> None:
    metrics = Metrics()
    metrics.add({"x": torch.tensor(0.1)})
    assert metrics.state_dict() == metrics.state_dict()
    assert metrics.flush(1)["x"] == torch.tensor(0.1).item()


@pytest.mark.parametrize("state", [{}, {"means": {"x": [1.0]}, "last": {}}, {"means": 3}])
def test_an_unreadable_state_names_the_flag(state: dict[str, object]) -> None:
    with pytest.raises(UserError, match="--reset-meters"):
        Metrics().load_state_dict(state)  # type: ignore[arg-type]


def test_ranks_are_summed_once_in_a_flush() -> None:
    calls: list[Tensor] = []

    def two_equal_ranks(vector: Tensor) -> Tensor:
        calls.append(vector)
        return vector * 2

    metrics = Metrics(two_equal_ranks)
    metrics.add({"a": torch.tensor(3.0), "b": (1.0, 4.0)})
    metrics.set({"lr": 0.5})
    assert metrics.flush(1) == {"num_updates": 1, "a": 3.0, "b": 1.0, "lr": 0.5}
    assert [call.tolist() for call in calls] == [[3.0, 1.0, 4.0, 4.0]]
    assert calls[0].dtype is torch.float64


def test_perplexity_overflows_to_infinity() -> None:
    assert perplexity(3.0) == 8.0
    assert perplexity(1e6) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_bits_per_byte_spread_a_token_over_its_bytes() -> None:
    assert bits_per_byte(6.0, 3.0) == 2.0


def test_a_vector_is_averaged_element_by_element() -> None:
    metrics = Metrics()
    metrics.add({"load": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "loss": 1.0})
    metrics.add({"load": (torch.tensor([[4.0, 2.0], [0.0, 1.0]]), 2.0)})
    metrics.set({"last": torch.tensor([1.0, 2.0])})
    record = metrics.flush(1)
    assert record["load"] == [[3.0, 2.0], [1.0, 2.0]]
    assert (record["loss"], record["last"]) == (1.0, [1.0, 2.0])


def test_vectors_survive_a_stop_to_the_bit() -> None:
    draws = torch.randn(5, 2, 3)

    def feed(metrics: Metrics, some: Tensor) -> None:
        for value in some:
            metrics.add({"load": value, "loss": (value[0, 0], 0.1)})

    straight, before, after = Metrics(), Metrics(), Metrics()
    feed(straight, draws)
    feed(before, draws[:3])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    feed(after, draws[3:])
    assert after.flush(5) == straight.flush(5)


def test_vectors_of_ranks_are_summed_in_the_same_call() -> None:
    calls: list[Tensor] = []

    def two_equal_ranks(vector: Tensor) -> Tensor:
        calls.append(vector)
        return vector * 2

    metrics = Metrics(two_equal_ranks)
    metrics.add({"load": torch.tensor([1.0, 3.0]), "loss": 2.0})
    assert metrics.flush(1) == {"num_updates": 1, "load": [1.0, 3.0], "loss": 2.0}
    assert len(calls) == 1
