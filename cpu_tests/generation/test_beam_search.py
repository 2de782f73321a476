import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from scalerun.generation.beam_search import BeamSearch, Hypothesis, best_tokens

EOS = 0
VOCABULARY = 3
LENGTH = 4


def table(seed: int) -> Callable[[tuple[int, ...]], Tensor]:
    """Log-probabilities of the next token as a function of all before it."""

    def logprobs(tokens: tuple[int, ...]) -> Tensor:
        number = seed
        for token in tokens:
            number = number * (VOCABULARY + 1) + token + 1
        generator = torch.Generator().manual_seed(number)
        return (2 * torch.randn(VOCABULARY, generator=generator)).log_softmax(-1)

    return logprobs


def run(
    model: Callable[[tuple[int, ...]], Tensor],
    *,
    beam: int,
    lenpen: float = 1.0,
    stops: Callable[[Hypothesis], bool] = lambda hypothesis: False,
    groups: int = 1,
    strength: float = 0.0,
) -> list[Hypothesis]:
    search = BeamSearch(
        beam=beam,
        lenpen=lenpen,
        max_length=LENGTH,
        eos=EOS,
        stops=stops,
        groups=groups,
        strength=strength,
    )
    before = search.live
    while True:
        logprobs = torch.stack([model(h.tokens) for h in search.live])
        order = search.step(*best_tokens(logprobs, beam=beam))
        if not order:
            return search.finished
        for parent, hypothesis in zip(order, search.live, strict=True):
            assert before[parent].tokens == hypothesis.tokens[:-1]
        before = search.live


def every_answer(
    model: Callable[[tuple[int, ...]], Tensor], lenpen: float
) -> list[tuple[float, tuple[int, ...]]]:
    answers = []
    for length in range(LENGTH + 1):
        for tokens in itertools.product(range(1, VOCABULARY), repeat=length):
            chosen = tokens if length == LENGTH else (*tokens, EOS)
            total = sum(model(tokens[:i])[token].double().item() for i, token in enumerate(chosen))
            answers.append((total / len(chosen) ** lenpen, tokens))
    return sorted(answers, reverse=True)


@pytest.mark.parametrize("lenpen", [-0.5, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_wide_beam_finds_what_trying_every_answer_finds(seed: int, lenpen: float) -> None:
    model = table(seed)
    expected = every_answer(model, lenpen)[:3]
    found = run(model, beam=40, lenpen=lenpen)[:3]
    assert [answer.tokens for answer in found] == [tokens for _, tokens in expected]
    assert [answer.score(lenpen) for answer in found] == pytest.approx(
        [score for score, _ in expected]
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_of_one_is_greedy(seed: int) -> None:
    model = table(seed)
    tokens: tuple[int, ...] = ()
    while len(tokens) < LENGTH and (best := int(model(tokens).argmax())) != EOS:
        tokens = (*tokens, best)
    [answer] = run(model, beam=1, lenpen=0.0)
    assert answer.tokens == tokens


def test_answers_are_sorted_and_their_scores_add_up() -> None:
    model = table(7)
    answers = run(model, beam=3, lenpen=0.5)
    scores = [answer.score(0.5) for answer in answers]
    assert scores == sorted(scores, reverse=True)
    for answer in answers:
        assert answer.logprobs == pytest.approx(
            [model(answer.tokens[:i])[t].item() for i, t in enumerate(answer.tokens)]
        )
        ending = 0.0 if answer.is_cut else model(answer.tokens)[EOS].item()
        assert answer.total == pytest.approx(sum(answer.logprobs) + ending)
        assert answer.length == len(answer.tokens) + (not answer.is_cut)


def test_what_is_ruled_out_is_in_no_answer() -> None:
    def no_end_and_no_two(tokens: tuple[int, ...]) -> Tensor:
        logprobs = table(3)(tokens).clone()
        logprobs[[EOS, 2]] = -torch.inf
        return logprobs

    answers = run(no_end_and_no_two, beam=5)
    assert [answer.tokens for answer in answers] == [(1,) * LENGTH]
    assert answers[0].is_cut


def test_an_answer_that_stops_is_finished() -> None:
    answers = run(table(1), beam=40, stops=lambda hypothesis: hypothesis.tokens[-1] == 2)
    assert answers
    assert all(2 not in answer.tokens[:-1] for answer in answers)
    assert any(answer.tokens[-1:] == (2,) and not answer.is_cut for answer in answers)


def test_the_search_ends_early_only_when_nothing_can_win() -> None:
    calls = 0

    def certain_end(tokens: tuple[int, ...]) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.tensor([0.98, 0.01, 0.01]).log()

    run(certain_end, beam=1, lenpen=0.0)
    assert calls == 1


def diverse_by_the_paper(
    model: Callable[[tuple[int, ...]], Tensor], *, beam: int, groups: int, strength: float
) -> list[list[tuple[tuple[int, ...], bool]]]:
    """Algorithm 1 of arXiv:1610.02424 to the last step: answers of each group, the best first.

    A group takes its best extensions until it has ``beam / groups`` that go on; those that end on
    the way are finished. It is over when none that goes on is better than its finished ones.
    """
    width = beam // groups
    live: list[list[tuple[tuple[int, ...], float]]] = [[((), 0.0)] for _ in range(groups)]
    done: list[list[tuple[float, tuple[int, ...], bool]]] = [[] for _ in range(groups)]
    for step in range(LENGTH):
        chosen_before: list[int] = []
        for group in range(groups):
            candidates = [
                (
                    total
                    + model(tokens)[token].double().item()
                    - strength * chosen_before.count(token),
                    (*tokens, token),
                )
                for tokens, total in live[group]
                for token in range(VOCABULARY)
            ]
            live[group] = []
            chosen_now = []
            for total, tokens in sorted(candidates, reverse=True):
                chosen_now.append(tokens[-1])
                if tokens[-1] == EOS:
                    done[group].append((total, tokens[:-1], False))
                    continue
                live[group].append((tokens, total))
                if len(live[group]) == width:
                    break
            chosen_before += chosen_now
            if step == LENGTH - 1:
                done[group] += [(total, tokens, True) for tokens, total in live[group]]
            done[group] = sorted(done[group], reverse=True)[:width]
            if (
                len(done[group]) == width
                and live[group]
                and done[group][-1][0] >= live[group][0][1]
            ):
                live[group] = []
    return [[(tokens, is_cut) for _, tokens, is_cut in found] for found in done]


@pytest.mark.parametrize("strength", [0.3, 1.5, 10.0])
@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (6, 3)])
@pytest.mark.parametrize("seed", range(6))
def test_groups_find_what_the_paper_s_algorithm_finds(
    seed: int, shape: tuple[int, int], strength: float
) -> None:
    beam, groups = shape
    model = table(seed)
    expected = diverse_by_the_paper(model, beam=beam, groups=groups, strength=strength)
    found = run(model, beam=beam, lenpen=0.0, groups=groups, strength=strength)
    assert sorted((answer.tokens, answer.is_cut) for answer in found) == sorted(
        answer for group in expected for answer in group
    )
    scores = [answer.total for answer in found]
    assert scores == sorted(scores, reverse=True)


def test_the_first_group_is_a_plain_search_and_a_strong_cost_drives_the_others_away() -> None:
    model = table(2)
    plain = [answer.tokens for answer in run(model, beam=2)]
    found = run(model, beam=4, groups=2, strength=100.0)
    assert set(plain) <= {answer.tokens for answer in found}
    assert len({answer.tokens for answer in found}) == 4


def test_without_a_cost_every_group_finds_the_same() -> None:
    plain = run(table(4), beam=2)
    found = run(table(4), beam=6, groups=3, strength=0.0)
    assert [answer.tokens for answer in found] == [a.tokens for a in plain for _ in range(3)]


def test_costs_are_not_part_of_a_score() -> None:
    model = table(5)
    for answer in run(model, beam=4, groups=4, strength=2.0):
        ending = 0.0 if answer.is_cut else model(answer.tokens)[EOS].item()
        assert answer.total == pytest.approx(sum(answer.logprobs) + ending)
