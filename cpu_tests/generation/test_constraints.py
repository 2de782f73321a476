import itertools
from collections.abc import Sequence

import pytest
import torch

from cpu_tests.generation.test_sequence_generator import (
    ToyDecoder,
    allowed,
    next_logprobs,
    one,
    toy,
)
from cpu_tests.generation.tiny_models import EOS, UNK, A, Letters
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.generation.sequence_generator import SequenceGenerator

LENGTH = 4
B = A + 1


def few_letters() -> SequenceGenerator:
    """A decoder of a, b and c."""
    tokenizer = Letters("abc")
    return SequenceGenerator(ToyDecoder(len(tokenizer.dictionary), seed=3), tokenizer)


def no_letter_twice(tokens: Sequence[int]) -> list[int] | None:
    """Any first token; then all but the last one, and the end."""
    return None if not tokens else [each for each in (A, A + 1, A + 2, EOS) if each != tokens[-1]]


def every_answer(
    generator: SequenceGenerator, params: SamplingParams
) -> list[tuple[float, tuple[int, ...]]]:
    """All answers that the parameters allow, by trying each: (score, tokens), the best first.

    Stop texts are single letters.
    """
    letters = range(A, A + 3)
    found = []
    for length in range(LENGTH + 1):
        for tokens in itertools.product(letters, repeat=length):
            text = generator.tokenizer.decode(tokens)
            stops = [
                n
                for n in range(max(params.min_new_tokens, 1), length + 1)
                if text[n - 1] in params.stop
            ]
            if stops and stops[0] < length:
                continue  # it would have ended before
            ends = length < LENGTH and not stops
            if ends and length < params.min_new_tokens:
                continue
            chosen = (*tokens, EOS) if ends else tokens
            if tokens[: len(params.prefix)] != params.prefix:
                continue
            limits = params.allowed_tokens or (lambda tokens: None)
            named = [limits(chosen[:i]) for i in range(len(params.prefix), len(chosen))]
            free = chosen[len(params.prefix) :]
            if any(each is not None and t not in each for t, each in zip(free, named, strict=True)):
                continue
            total = sum(
                next_logprobs(generator, [], list(chosen[:i]))[token].item()
                for i, token in enumerate(chosen)
            )
            found.append((total / len(chosen) ** params.lenpen, tokens))
    return sorted(found, reverse=True)


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"min_new_tokens": 2},
        {"stop": ("b",)},
        {"prefix": (A, A + 2)},
        {"prefix": (B,), "allowed_tokens": no_letter_twice},
        {"allowed_tokens": no_letter_twice, "min_new_tokens": 2, "stop": ("c",)},
    ],
)
@pytest.mark.parametrize("lenpen", [0.0, 0.7, 1.5])
def test_a_wide_search_finds_the_n_best_of_all_answers(lenpen: float, rules: dict) -> None:
    generator = few_letters()
    params = SamplingParams(beam=128, max_new_tokens=LENGTH, lenpen=lenpen, **rules)
    expected = every_answer(generator, params)
    [found] = generator.hypotheses([[]], [params])
    assert len(found) >= min(len(expected), 5)
    for answer, (score, tokens) in zip(found, expected, strict=False):
        assert tuple(answer.tokens) == tokens
        assert answer.score == pytest.approx(score, abs=1e-5)


def test_a_draw_begins_as_it_must_and_goes_on_by_itself() -> None:
    generator = toy()
    params = SamplingParams(seed=1, prefix=(A, A, B), max_new_tokens=9, min_new_tokens=4)
    result = one(generator, [], params)
    assert tuple(result.tokens[:3]) == params.prefix
    expected = [
        next_logprobs(generator, [], result.tokens[:i])[t] for i, t in enumerate(result.tokens)
    ]
    assert result.token_logprobs == pytest.approx([each.item() for each in expected], abs=1e-5)


def test_a_beginning_may_hold_what_is_never_generated() -> None:
    result = one(toy(), [], SamplingParams(temperature=0.0, prefix=(UNK,), max_new_tokens=3))
    assert result.tokens[0] == UNK
    assert UNK not in result.tokens[1:]


@pytest.mark.parametrize("beam", [1, 3])
def test_only_what_is_allowed_follows(beam: int) -> None:
    generator = few_letters()
    for seed in range(10):
        params = SamplingParams(
            seed=seed, beam=beam, allowed_tokens=no_letter_twice, max_new_tokens=12
        )
        tokens = one(generator, [], params).tokens
        assert all(a != b for a, b in itertools.pairwise(tokens))


def test_greedy_takes_the_likeliest_of_what_is_allowed() -> None:
    generator = few_letters()
    params = SamplingParams(temperature=0.0, allowed_tokens=no_letter_twice, max_new_tokens=8)
    tokens = one(generator, [], params).tokens
    for i, token in enumerate(tokens):
        logprobs = allowed(generator, next_logprobs(generator, [], tokens[:i]), may_end=True)
        if i:
            logprobs[tokens[i - 1]] = -torch.inf
        assert token == logprobs.argmax()


@pytest.mark.parametrize("beam", [1, 2])
def test_where_nothing_may_follow_the_answer_ends(beam: int) -> None:
    def one_letter(tokens: Sequence[int]) -> list[int]:
        return [] if tokens else [B]

    params = SamplingParams(beam=beam, allowed_tokens=one_letter, max_new_tokens=3)
    result = one(toy(), [], params)
    assert result.tokens == [B]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("token", [-1, 99])
def test_a_token_that_there_is_not_is_refused(token: int) -> None:
    params = SamplingParams(allowed_tokens=lambda tokens: [token], max_new_tokens=3)
    with pytest.raises(ValueError, match=f"token {token} may follow .* there are 0 to 7"):
        one(toy(), [], params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam": 4, "diverse_beam_groups": 3}, "--diverse-beam-groups is 3; give a divisor"),
        ({"beam": 4, "diverse_beam_groups": 0}, "--diverse-beam-groups is 0; give a divisor"),
        (
            {"beam": 4, "diverse_beam_groups": 2, "diverse_beam_strength": -1.0},
            "--diverse-beam-strength is -1; give 0 or more",
        ),
        ({"prefix": (A, B), "max_new_tokens": 1}, "begin with 2 tokens"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**settings)


def test_groups_of_a_real_search_differ_where_they_are_kept_apart() -> None:
    generator = toy()
    params = [
        SamplingParams(beam=4, diverse_beam_groups=g, diverse_beam_strength=50.0, max_new_tokens=3)
        for g in (1, 4)
    ]
    _, diverse = generator.hypotheses([[], []], params)
    firsts = {tuple(answer.tokens[:1]) for answer in diverse}
    assert len(firsts) == 4
