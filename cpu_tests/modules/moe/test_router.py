from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scalerun.modules.moe.router import Gating, route


def logits_of(*first: list[float]) -> Tensor:
    return torch.tensor(first, dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("top_k", "fraction", "training", "expected"),
    [
        (2, 0.25, True, 8),
        (1, 0.25, True, 4),
        (2, 0.25, False, 4),
        (1, 0.3, False, 4),
        (2, -1.0, False, 8),
        (1, 0.0, False, 4),
    ],
)
def test_capacity_follows_the_table(
    top_k: int, fraction: float, training: bool, expected: int
) -> None:
    gating = Gating(top_k=top_k, eval_capacity_fraction=fraction)
    for count in (13, torch.tensor(13.0, dtype=torch.float64)):
        assert gating.capacity(count, 4, training=training) == expected


def test_first_choices_find_places_before_second_ones() -> None:
    logits = logits_of([0.5, 0.4, 0.1], [0.4, 0.5, 0.1], [0.1, 0.6, 0.3], [0.2, 0.7, 0.1])
    gating = Gating(second_expert="all", eval_capacity_fraction=0.5)
    routing = route(logits, gating, training=False)
    assert routing.capacity == 2
    assert routing.experts_KS.tolist() == [[0, 1, 1, 1], [1, 0, 2, 0]]
    assert routing.places_KS.tolist() == [[0, 0, 1, 2], [3, 1, 0, 2]]
    assert routing.kept_KS.tolist() == [[True, True, True, False], [False, True, True, False]]
    expected = [[1.0, 5 / 9, 6 / 9, 0.0], [0.0, 4 / 9, 3 / 9, 0.0]]
    torch.testing.assert_close(
        routing.weights_KS, torch.tensor(expected).double(), rtol=1e-6, atol=0
    )
    assert routing.stats["overflow_expert1"] == 25.0
    assert routing.stats["overflow_expert2"] == 50.0


def test_weights_that_are_normalised_before_dropping_are_not_raised_after_it() -> None:
    logits = logits_of([0.5, 0.4, 0.1], [0.5, 0.4, 0.1])
    gating = Gating(second_expert="all", normalize_before_dropping=True, eval_capacity_fraction=0.5)
    routing = route(logits, gating, training=False)
    expected = torch.tensor([[5 / 9, 0.0], [4 / 9, 0.0]]).double()
    torch.testing.assert_close(routing.weights_KS, expected, rtol=1e-6, atol=0)


def test_ties_go_to_the_lowest_number() -> None:
    routing = route(torch.zeros(3, 4), Gating(second_expert="all"), training=True)
    assert routing.experts_KS.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_uniform_routing_has_a_balance_loss_of_one() -> None:
    logits = torch.eye(4).repeat(3, 1) * 1e-6
    assert route(logits, Gating(), training=True).loss.item() == pytest.approx(1.0)


def test_the_balance_loss_teaches_through_the_probabilities_alone() -> None:
    logits = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)

    def loss(logits: Tensor) -> Tensor:
        return route(logits, Gating(second_expert="all"), training=False).loss

    assert torch.autograd.gradcheck(loss, logits)


@pytest.mark.parametrize("policy", ["random", "sampling"])
def test_evaluation_draws_nothing_unless_it_is_asked_to(policy: str) -> None:
    logits = torch.randn(40, 5)
    state = torch.get_rng_state()
    quiet = Gating(second_expert=policy)
    first = route(logits, quiet, training=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(route(logits, quiet, training=False).kept_KS, first.kept_KS)
    loud = Gating(second_expert=policy, deterministic_eval=False)
    for gating, training in ((loud, False), (quiet, True)):
        torch.set_rng_state(state)
        route(logits, gating, training=training)
        assert not torch.equal(torch.get_rng_state(), state)


def test_without_draws_a_second_choice_is_kept_that_is_kept_more_often_than_not() -> None:
    logits = logits_of([0.9, 0.1], [0.74, 0.26], [0.76, 0.24])
    routing = route(logits, Gating(eval_capacity_fraction=1.0), training=False)
    assert routing.kept_KS[1].tolist() == [False, True, False]


def test_a_random_second_choice_is_kept_with_twice_its_weight() -> None:
    logits = logits_of([0.8, 0.2]).expand(20000, 2)
    routing = route(logits, Gating(), training=True)
    wanted = routing.stats["expert_load"][1] / routing.stats["expert_load"][0]
    assert wanted.item() == pytest.approx(0.4, abs=0.02)


def test_sampling_adds_the_noise_of_torchs_gumbel_distribution(
    reference_gating: Callable[..., Any],
) -> None:
    logits = torch.randn(30, 6)
    gating = Gating(second_expert="sampling")
    torch.manual_seed(2)
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    noise = torch.distributions.gumbel.Gumbel(zero, one).rsample(torch.Size((30, 6)))
    torch.manual_seed(2)
    routing = route(logits, gating, training=True)
    expected = reference_gating(logits, gating, training=True, noise_SE=noise)
    weights = expected.combine_SEC.sum(-1)
    found = torch.zeros(30, 6).scatter_add_(1, routing.experts_KS.t(), routing.weights_KS.t())
    torch.testing.assert_close(found, weights.float())
    assert (routing.experts_KS[1] != logits.topk(2).indices[:, 1]).any()


def test_float32_routing_is_exact_about_which_choice_has_a_place() -> None:
    """Also with more experts than short integers can number."""
    logits = torch.randn(50, 2**15 + 3)
    routing = route(logits, Gating(second_expert="all", eval_capacity_fraction=1.0), training=False)
    assert routing.kept_KS.all()
    assert routing.places_KS.max() < 50
