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
) -> list[Hypothesis]:
    search = BeamSearch(beam=beam, lenpen=lenpen, max_length=LENGTH, eos=EOS, stops=stops)
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
