import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerun.data.base_dataset import BaseDataset
from scalerun.data.batch_plan import Cut, Position, plan_updates
from scalerun.dataclass.errors import UserError


class Sizes(BaseDataset):
    """Shards of given sizes; nothing is ever made of them."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.prefetched = []

    @property
    def fingerprint(self):
        return "text-settings"

    def num_shards(self):
        return len(self.sizes)

    def shard(self, epoch, index):
        return range(self.sizes[index])

    def prefetch(self, index):
        self.prefetched.append(index)

    def collate(self, samples, sample_ids):
        raise NotImplementedError

    def counts(self):
        return None


shards = st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any)


def numbers(plan):
    """(epoch, shard, sample) of a batch, and the ids it claims."""
    found = [(s.epoch, s.shard, s.first + i) for s in plan.segments for i in range(s.count)]
    return found, list(range(plan.first_id, plan.first_id + len(found)))


def in_order(sizes, epochs):
    return [
        (epoch, shard, i)
        for epoch in range(1, epochs + 1)
        for shard, size in enumerate(sizes)
        for i in range(size)
    ]


@given(shards, st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=200)
def test_all_ranks_together_read_the_order_once_an_epoch(sizes, batch_size, freq, ranks):
    streams = [
        plan_updates(
            Sizes(sizes), Position(), Cut(batch_size, lambda epoch: freq, rank, ranks), max_epoch=2
        )
        for rank in range(ranks)
    ]
    found, ids = [], []
    for updates in zip(*streams, strict=True):
        assert len({len(plans) for plans in updates}) == 1  # as many batches on every rank
        assert len({plans[-1].after for plans in updates}) == 1
        for plans in zip(*updates, strict=True):
            for plan in plans:
                samples, claimed = numbers(plan)
                assert len(samples) <= batch_size
                found += samples
                ids += claimed if samples else []
        assert [plan.ends_update for plan in updates[0]] == [False] * (len(updates[0]) - 1) + [True]
    assert found == in_order(sizes, 2)
    assert ids == list(range(sum(sizes))) * 2


@given(shards, st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=200)
def test_only_the_last_update_of_an_epoch_is_smaller(sizes, batch_size, freq):
    cut = Cut(batch_size, lambda epoch: freq)
    updates = list(plan_updates(Sizes(sizes), Position(), cut, max_epoch=1))
    amounts = [sum(len(numbers(plan)[0]) for plan in plans) for plans in updates]
    assert amounts[:-1] == [batch_size * freq] * (len(amounts) - 1)
    assert [plans[-1].ends_epoch for plans in updates] == [False] * (len(updates) - 1) + [True]
    assert updates[-1][-1].after == Position(epoch=2)


@given(shards, st.integers(1, 5), st.integers(1, 5), st.integers(0, 12))
@settings(max_examples=200)
def test_going_on_with_another_batch_size_starts_at_the_next_sequence(sizes, first, second, stop):
    updates = plan_updates(Sizes(sizes), Position(), Cut(first, lambda epoch: 1), max_epoch=2)
    found, position = [], Position()
    for plans, _ in zip(updates, range(stop), strict=False):
        found += numbers(plans[0])[0]
        position = plans[-1].after
    rest = plan_updates(Sizes(sizes), position, Cut(second, lambda epoch: 1), max_epoch=2)
    for plans in rest:
        found += numbers(plans[0])[0]
    assert found == in_order(sizes, 2)


def test_batches_per_update_may_differ_by_epoch():
    cut = Cut(2, lambda epoch: epoch)
    updates = plan_updates(Sizes([4]), Position(), cut, max_epoch=2)
    assert [(plans[0].epoch, len(plans)) for plans in updates] == [(1, 1), (1, 1), (2, 2)]


def test_the_shard_behind_the_current_one_is_asked_for_wherever_reading_starts():
    dataset = Sizes([3, 3, 3])
    next(plan_updates(dataset, Position(1, 2, 1, 7), Cut(1, lambda epoch: 1)))
    assert dataset.prefetched == [0]
    alone = Sizes([3])
    next(plan_updates(alone, Position(), Cut(1, lambda epoch: 1)))
    assert alone.prefetched == []


def test_data_without_sequences_is_refused():
    with pytest.raises(UserError, match="the data has no documents"):
        next(plan_updates(Sizes([0, 0]), Position(), Cut(1, lambda epoch: 1)))
