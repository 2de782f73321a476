import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scalerun.generation.sampling import choose_tokens, draw, most_likely, penalized

PROBABILITIES = [0.1, 0.5, 0.15, 0.25]


def choose(
    probabilities: list[float],
    uniform: float,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    return int(
        choose_tokens(
            torch.tensor([probabilities], dtype=torch.float64).log(),
            temperature_B=torch.tensor([temperature]),
            top_k_B=torch.tensor([top_k]),
            top_p_B=torch.tensor([top_p], dtype=torch.float64),
            min_p_B=torch.tensor([min_p], dtype=torch.float64),
            uniform_B=torch.tensor([uniform], dtype=torch.float64),
        )
    )


def left_over(*, top_k: int = 0, top_p: float = 1.0) -> set[int]:
    kept = most_likely(
        torch.tensor([PROBABILITIES], dtype=torch.float64).log(),
        top_k_B=torch.tensor([top_k]),
        top_p_B=torch.tensor([top_p], dtype=torch.float64),
    )
    return set(kept[0].nonzero()[:, 0].tolist())


@pytest.mark.parametrize(
    ("top_k", "kept"), [(0, {0, 1, 2, 3}), (1, {1}), (2, {1, 3}), (3, {1, 2, 3}), (9, {0, 1, 2, 3})]
)
def test_top_k_leaves_the_k_most_likely(top_k: int, kept: set[int]) -> None:
    assert left_over(top_k=top_k) == kept


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-9, {1}),
        (0.49, {1}),
        (0.51, {1, 3}),
        (0.74, {1, 3}),
        (0.76, {1, 2, 3}),
        (0.91, {0, 1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_top_p_keeps_the_token_that_crosses_it(top_p: float, kept: set[int]) -> None:
    assert left_over(top_p=top_p) == kept


def test_top_p_counts_the_mass_that_top_k_has_left() -> None:
    # Of the two left the first has 2/3.
    assert left_over(top_k=2, top_p=0.66) == {1}
    assert left_over(top_k=2, top_p=0.67) == {1, 3}


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.0, {0, 1, 2, 3}), (0.19, {0, 1, 2, 3}), (0.21, {1, 2, 3}), (1.0, {1})]
)
def test_min_p_leaves_what_has_that_share_of_the_likeliest(min_p: float, kept: set[int]) -> None:
    points = [(i + 0.5) / 100 for i in range(100)]
    assert {choose(PROBABILITIES, point, min_p=min_p) for point in points} == kept


def test_min_p_looks_at_the_tempered_distribution() -> None:
    # At temperature 1/2 the shares of the likeliest are squared: 0.3 becomes 0.09.
    points = [(i + 0.5) / 100 for i in range(100)]
    kept = {choose(PROBABILITIES, point, temperature=0.5, min_p=0.1) for point in points}
    assert kept == {1, 3}


def test_penalties_are_those_of_their_formulas() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0, 3.0, 0.0]])
    found = penalized(
        logits,
        counts_BV=torch.tensor([[0.0, 0.0, 3.0, 1.0, 0.0, 2.0]]).double(),
        in_prompt_BV=torch.tensor([[True, True, True, False, False, False]]),
        repetition_B=torch.tensor([2.0]).double(),
        presence_B=torch.tensor([0.5]).double(),
        frequency_B=torch.tensor([0.25]).double(),
    )
    # Divided, or multiplied if negative; then 0.5 and 0.25 for each time off what was answered.
    expected = [1.0, -4.0, 0.5 - 0.5 - 0.75, -2.0 - 0.5 - 0.25, 3.0, -0.5 - 0.5]
    assert found.tolist() == [pytest.approx(expected)]


def test_of_equal_tokens_the_lower_ids_stay() -> None:
    kept = most_likely(
        torch.zeros(1, 5),
        top_k_B=torch.tensor([2]),
        top_p_B=torch.tensor([1.0], dtype=torch.float64),
    )
    assert kept[0].tolist() == [True, True, False, False, False]


def test_a_limit_of_one_leaves_even_the_tokens_that_rounding_hides() -> None:
    logits = torch.zeros(1, 50_000)
    logits[0, 1:] = -40.0
    kept = most_likely(logits, top_k_B=torch.tensor([0]), top_p_B=torch.tensor([1.0]).double())
    assert bool(kept.all())


def test_temperature_zero_takes_the_most_likely_of_equals_the_first() -> None:
    assert choose([0.2, 0.4, 0.4], 0.99, temperature=0.0) == 1


@pytest.mark.parametrize("temperature", [1e-300, 1e-6])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    assert choose(PROBABILITIES, 0.0, temperature=temperature) == 1
    assert choose(PROBABILITIES, 0.999, temperature=temperature) == 1


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.099, 0), (0.101, 1), (0.599, 1), (0.601, 2), (0.999, 3)]
)
def test_a_uniform_number_falls_on_the_tokens_in_their_order(uniform: float, token: int) -> None:
    assert choose(PROBABILITIES, uniform) == token


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_tempered_distribution(temperature: float) -> None:
    logits = torch.tensor(PROBABILITIES, dtype=torch.float64).log()
    count = 10_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    chosen = choose_tokens(
        logits.expand(count, -1),
        temperature_B=torch.full((count,), temperature),
        top_k_B=torch.zeros(count, dtype=torch.int64),
        top_p_B=torch.ones(count, dtype=torch.float64),
        min_p_B=torch.zeros(count, dtype=torch.float64),
        uniform_B=uniform,
    )
    frequencies = torch.bincount(chosen, minlength=4) / count
    expected = (logits / temperature).softmax(-1)
    assert torch.allclose(frequencies.double(), expected, atol=2 / count)


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(lambda values: sum(values) > 1e-9),
    st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2**-53)),
)
def test_a_token_of_mass_zero_is_never_drawn(masses: list[float], uniform: float) -> None:
    probabilities = torch.tensor([masses], dtype=torch.float64)
    token = int(draw(probabilities, torch.tensor([uniform], dtype=torch.float64)))
    assert masses[token] > 0


def test_what_is_ruled_out_is_never_chosen() -> None:
    for uniform in (0.0, 0.5, 1 - 2**-53):
        for temperature in (0.0, 0.1, 100.0):
            assert choose([0.0, 1.0, 0.0], uniform, temperature=temperature) == 1


def test_a_row_follows_its_own_rules_whatever_its_neighbours_do() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 50)
    rules: dict[str, Tensor] = {
        "temperature_B": torch.tensor([0.0, 1.0, 0.7, 1.0, 2.0, 1.0]),
        "top_k_B": torch.tensor([0, 0, 5, 1, 0, 3]),
        "top_p_B": torch.tensor([1.0, 1.0, 0.9, 1.0, 0.5, 0.1], dtype=torch.float64),
        "min_p_B": torch.tensor([0.0, 0.3, 0.0, 0.0, 0.1, 0.0], dtype=torch.float64),
        "uniform_B": torch.rand(6, dtype=torch.float64),
    }
    together = choose_tokens(logits, **rules)
    for i in range(6):
        alone = choose_tokens(
            logits[i : i + 1], **{name: rule[i : i + 1] for name, rule in rules.items()}
        )
        assert together[i] == alone
    assert together[0] == logits[0].argmax()
    assert together[3] == logits[3].argmax()


def test_negative_infinity_as_probability_zero_is_no_nan() -> None:
    assert choose([1.0, 0.0], 0.5, top_k=2, top_p=0.5) == 0
    assert math.isinf(torch.tensor(0.0).log())
