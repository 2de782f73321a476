"""One run goes on with 4, 2, 1 and again 4 ranks: no sequence is left out, none is read twice."""

import itertools

import pytest

from cpu_tests.conftest import make_corpus
from cpu_tests.layouts.training import ARCHITECTURES, make_trainer, train
from cpu_tests.world import run_world

SIZES = (4, 2, 1, 4)
EACH = 6
"""Updates at each size; an epoch has 16 of them."""


def read_ids(data, home, size, updates):
    """(sequences of every update, over all ranks; the losses) up to an update."""

    def work(rank=0):
        trainer = make_trainer(data, home, ARCHITECTURES["dense"], updates=updates, data_size=size)
        step, updates_ids = trainer.train_step, []

        def record(batches):
            updates_ids.append([i for batch in batches for i in batch.sample_ids])
            return step(batches)

        trainer.train_step = record
        return train(trainer).losses, updates_ids

    results = run_world(size, work) if size > 1 else [work()]
    per_rank = [ids for _, ids in results]
    updates_ids = [sorted(itertools.chain(*each)) for each in zip(*per_rank, strict=True)]
    return updates_ids, results[0][0]


def test_every_sequence_is_read_once_and_in_the_order_of_one_process(tmp_path):
    data = make_corpus(tmp_path / "data")
    expected, losses = read_ids(data, tmp_path / "alone", 1, EACH * len(SIZES))
    found, found_losses = [], []
    for run, size in enumerate(SIZES, start=1):
        ids, part = read_ids(data, tmp_path / "elastic", size, EACH * run)
        assert len(ids) == EACH
        found += ids
        found_losses += part
    assert found == expected
    assert found_losses == pytest.approx(losses, rel=1e-4)
    assert len({i for ids in expected for i in ids}) < sum(map(len, expected)), "one epoch"
