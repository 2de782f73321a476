"""Statistics of masks over a million tokens, and the rules for short sequences."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from scalerun.data.masked.masking import Masking

MASK = 1000
ORDINARY = (4, 900)
LENGTH = 500
MILLION = 1_000_000


def make(mask_prob=0.15, span_length=3.0, leave=0.1, random=0.1):
    return Masking(mask_prob, span_length, leave, random, MASK, ORDINARY)


def runs(places):
    """Lengths of the runs of neighbouring places."""
    starts = np.flatnonzero(np.diff(places, prepend=-2) > 1)
    return np.diff(starts, append=len(places))


@pytest.fixture(scope="module")
def tokens():
    # No random replacement is ever the token itself: these are outside of what is drawn from.
    return np.full(LENGTH, 950, dtype=np.uint16)


@pytest.mark.parametrize(
    ("mask_prob", "span_length", "leave", "random"),
    [(0.15, 3.0, 0.1, 0.1), (0.15, 1.0, 0.0, 0.0), (0.3, 5.5, 0.25, 0.5), (0.05, 2.0, 0.0, 1.0)],
)
def test_a_million_tokens_have_the_shares_that_the_flags_say(
    tokens, mask_prob, span_length, leave, random
):
    masking = make(mask_prob, span_length, leave, random)
    selected = spans = kept = hidden = 0
    for number in range(MILLION // LENGTH):
        block = masking(tokens, 1, number)
        seen = block.tokens[block.places]
        selected += len(seen)
        spans += len(runs(block.places))
        kept += int((seen == 950).sum())
        hidden += int((seen == MASK).sum())
        untouched = np.delete(block.tokens, block.places)
        assert (untouched == 950).all()
        assert (block.targets == 950).all()
    assert selected / MILLION == pytest.approx(mask_prob, rel=0.01)
    assert kept / selected == pytest.approx(leave, rel=0.01, abs=1e-12)
    assert hidden / selected == pytest.approx(1 - leave - random, rel=0.01, abs=1e-12)
    if span_length > 1:
        assert selected / spans == pytest.approx(span_length, rel=0.01)


def test_lengths_of_spans_are_those_of_a_random_division(tokens):
    """Of N tokens in s spans, C(N - l - 1, s - 2) of C(N - 1, s - 1) divisions begin with l."""
    masking = make(mask_prob=0.2, span_length=4.0)  # always 100 tokens in 25 spans
    found = Counter()
    for number in range(400):
        lengths = runs(masking(tokens, 2, number).places)
        assert len(lengths) == 25
        found.update(lengths.tolist())
    share, expected = 24 / 99, {}
    for length in range(1, 8):
        expected[length] = share
        share *= (100 - length - 24) / (99 - length)
    for length, probability in expected.items():
        assert found[length] / 10_000 == pytest.approx(probability, abs=0.015)


def test_single_tokens_are_any_set_with_equal_chance():
    masking = make(mask_prob=0.5, span_length=1.0)
    tokens = np.arange(4, 8)
    found = Counter(tuple(masking(tokens, 3, i).places.tolist()) for i in range(6000))
    assert set(found) == set(combinations(range(4), 2))
    assert all(count == pytest.approx(1000, rel=0.15) for count in found.values())


def test_every_place_is_hidden_equally_often():
    masking = make(mask_prob=0.3, span_length=3.0)
    tokens = np.arange(4, 34)
    counts = np.zeros(30)
    for number in range(4000):
        counts[masking(tokens, 4, number).places] += 1
    inner = counts[3:-3] / 4000
    assert inner == pytest.approx(np.full(24, 0.3), abs=0.04)
    assert (counts / 4000 > 0.1).all()  # a span that holds the first token begins with it


def test_random_symbols_are_all_the_ordinary_ones(tokens):
    masking = Masking(0.5, 1.0, 0.0, 1.0, MASK, (4, 9))
    seen = Counter()
    for number in range(40):
        block = masking(tokens, 5, number)
        seen.update(block.tokens[block.places].tolist())
    assert set(seen) == {4, 5, 6, 7, 8}
    assert all(count == pytest.approx(2000, rel=0.1) for count in seen.values())


def test_a_mask_is_a_function_of_its_key_alone(tokens):
    masking = make()
    first, again, other = (masking(tokens, *key) for key in ((1, 2), (1, 2), (1, 3)))
    assert np.array_equal(first.tokens, again.tokens)
    assert np.array_equal(first.places, again.places)
    assert not np.array_equal(first.places, other.places)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("prob", [0.01, 0.15, 0.99])
@pytest.mark.parametrize("span", [1.0, 3.0, 50.0])
def test_short_sequences_keep_a_token_to_see(length, prob, span):
    masking = make(prob, span)
    total = 0
    for number in range(300):
        block = masking(np.arange(4, 4 + length), 6, number)
        assert len(block.places) < length or length == 0
        assert len(set(block.places.tolist())) == len(block.places) == len(block.targets)
        assert np.array_equal(block.targets, block.places + 4)
        total += len(block.places)
    if length == 5 and prob == 0.15:
        assert total / 1500 == pytest.approx(0.15, rel=0.15)
