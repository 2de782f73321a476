import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerun.data.length_batches import (
    BatchLimits,
    LengthBatches,
    padding_share,
    train_limits,
    valid_limits,
)
from scalerun.dataclass.configs import DatasetConfig
from scalerun.dataclass.errors import ConfigError

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=80)
KEYS = st.none() | st.tuples(st.integers(0, 9), st.integers(1, 9))


def draw_lengths(size):
    """Sources of 1 to 60 tokens and targets that are about as long."""
    draw = np.random.default_rng(0)
    source = draw.integers(1, 61, size)
    return np.stack([source, np.maximum(source + draw.integers(-5, 6, size), 1)], 1)


def as_lists(batches):
    return [(batch.members.tolist(), batch.first) for batch in batches]


@given(
    lengths=LENGTHS, key=KEYS, sentences=st.none() | st.integers(1, 20), multiple=st.integers(1, 9)
)
def test_every_sequence_is_in_one_batch_and_no_batch_is_too_large(
    lengths, key, sentences, multiple
):
    lengths = np.array(lengths)
    limits = BatchLimits(sentences, 100, multiple)
    batches = LengthBatches(lengths, limits, key=key)
    members = [batch.members for batch in batches]
    assert sorted(np.concatenate(members)) == list(range(len(lengths)))
    assert [batch.first for batch in batches] == [
        sum(map(len, members[:i])) for i in range(len(members))
    ]
    for each in members:
        assert (len(each) * lengths[each].max(axis=0) <= 100).all()
        assert sentences is None or len(each) <= sentences


@given(lengths=LENGTHS, key=st.tuples(st.integers(0, 9), st.integers(1, 9)))
def test_the_order_is_a_function_of_the_key_and_the_number_of_batches_of_none(lengths, key):
    lengths = np.array(lengths)
    limits = BatchLimits(max_tokens=90)
    first, again = (LengthBatches(lengths, limits, key=key) for _ in range(2))
    assert as_lists(first) == as_lists(again)
    assert len(LengthBatches(lengths, limits)) == len(first)


def test_epochs_and_seeds_have_other_batches_in_another_order():
    lengths = draw_lengths(500)
    orders = {
        str(as_lists(LengthBatches(lengths, BatchLimits(max_tokens=500), key=key)))
        for key in ((1, 1), (1, 2), (2, 1))
    }
    assert len(orders) == 3


def test_without_a_key_batches_are_sorted_by_length_and_equal_lengths_by_number():
    lengths = np.array([[3], [1], [2], [1], [3], [2]])
    batches = LengthBatches(lengths, BatchLimits(max_sentences=2))
    assert as_lists(batches) == [([1, 3], 0), ([2, 5], 2), ([0, 4], 4)]


def test_padding_is_little():
    lengths = draw_lengths(4000)
    batches = LengthBatches(lengths, BatchLimits(max_tokens=2000), key=(1, 1))
    order = np.random.default_rng(1).permutation(4000)
    at_random = LengthBatches(np.full((4000, 1), 60), BatchLimits(max_tokens=2000))
    shuffled = [type(b)(order[b.members], b.first) for b in at_random]
    assert padding_share(batches, lengths) < 0.08
    assert padding_share(shuffled, lengths) > 0.4


def test_tokens_give_a_multiple_of_sequences_where_they_allow_that_many():
    ten = np.full((100, 1), 10)
    sizes = [len(batch.members) for batch in LengthBatches(ten, BatchLimits(max_tokens=199))]
    assert sizes == [16] * 6 + [4]
    sizes = [len(batch.members) for batch in LengthBatches(ten, BatchLimits(max_tokens=70))]
    assert sizes == [7] * 14 + [2]
    sizes = [len(batch.members) for batch in LengthBatches(ten, BatchLimits(12, 999))]
    assert sizes == [12] * 8 + [4], "a number of sequences is taken as it is given"


def test_a_sequence_above_the_limit_is_an_error():
    with pytest.raises(ValueError, match="11 tokens do not fit into 10"):
        LengthBatches(np.array([[3], [11]]), BatchLimits(max_tokens=10))


def test_validation_takes_the_limits_of_training_unless_it_has_its_own():
    cfg = DatasetConfig(batch_size=4, max_tokens=100)
    assert train_limits(cfg) == valid_limits(cfg) == BatchLimits(4, 100, 8)
    cfg = DatasetConfig(
        batch_size=4, batch_size_valid=2, max_tokens_valid=50, required_batch_size_multiple=1
    )
    assert train_limits(cfg) == BatchLimits(4, None, 1)
    assert valid_limits(cfg) == BatchLimits(2, 50, 1)


def test_a_multiple_is_above_zero():
    DatasetConfig(batch_size=9, required_batch_size_multiple=2).validate()
    with pytest.raises(ConfigError, match="--required-batch-size-multiple is 0"):
        DatasetConfig(required_batch_size_multiple=0).validate()
