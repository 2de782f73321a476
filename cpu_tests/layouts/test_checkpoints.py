"""A checkpoint of any layout goes on at any other: the same bytes, then the same numbers."""

import pytest
import torch

from cpu_tests.conftest import make_corpus
from cpu_tests.layouts.training import ARCHITECTURES, BATCHES, make_trainer, train, whole
from cpu_tests.world import run_world
from scalerun.checkpoint.consolidation import weight_entries
from scalerun.checkpoint.manifest import read_manifest
from scalerun.checkpoint.state_tree import flatten_tensors, split_state

SAVED, MORE = 3, 2
TENSOR = ["--model-parallel-size", "2"]
LAYOUTS = {
    "one": (1, 1, []),
    "shard 2": (2, 2, []),
    "copies 2": (2, 2, ["--ddp-backend", "pytorch_ddp"]),
    "shard 4": (4, 4, []),
    "expert 2 of copies 4": (
        4,
        4,
        ["--expert-parallel-size", "2", "--ddp-backend", "pytorch_ddp"],
    ),
    "expert 2 of shards 4": (4, 4, ["--expert-parallel-size", "2"]),
    "tensor 2 x expert 2": (4, 2, [*TENSOR, "--sequence-parallel", "--expert-parallel-size", "2"]),
}
"""Ranks, those of them that read other batches, and flags."""


def run_at(layout, work):
    """Call ``work(data_size, flags)`` at a layout -> the results of all ranks."""
    size, data_size, flags = LAYOUTS[layout]
    if size == 1:
        return [work(data_size, flags)]
    return run_world(size, lambda rank: work(data_size, flags))


def state_of(trainer):
    """All tensors of a run, whole."""
    parts = {part: split_state(owner.state_dict())[0] for part, owner in trainer.stateful().items()}
    return {name: whole(tensor) for name, tensor in flatten_tensors(parts).items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The data, a run folder for each layout, and its state when it was saved."""
    home = tmp_path_factory.mktemp("saved")
    data = make_corpus(home / "data")
    states = {}
    for layout in LAYOUTS:
        folder = home / layout.replace(" ", "_")

        def work(data_size, flags, folder=folder):
            words = [*ARCHITECTURES["moe"], "--store-ema", *flags]
            trainer = make_trainer(data, folder, words, updates=SAVED, data_size=data_size)
            train(trainer)
            return state_of(trainer)

        states[layout] = (folder, run_at(layout, work)[0])
    return data, states


def test_the_manifest_says_how_many_wrote(saved):
    for layout, (folder, _) in saved[1].items():
        manifest = read_manifest(folder / f"checkpoint_{SAVED}")
        assert manifest.world_size == LAYOUTS[layout][0]
        files = [name for name in manifest.files if name.endswith(".distcp")]
        assert len(files) == manifest.world_size


@pytest.mark.parametrize("part", ["model", "ema"])
def test_tensors_that_many_ranks_wrote_are_read_whole_one_by_one(saved, part):
    for layout, (folder, expected) in saved[1].items():
        entries = weight_entries(folder / f"checkpoint_{SAVED}", part=part)
        assert {f"{part}.{e.name}" for e in entries} == {
            name for name in expected if name.startswith(f"{part}.")
        }
        for entry in entries:
            assert torch.equal(entry.read(), expected[f"{part}.{entry.name}"]), (layout, entry.name)


@pytest.mark.parametrize("after", LAYOUTS)
def test_every_byte_and_the_next_losses_are_the_same(after, saved, tmp_path):
    data, states = saved

    def work(data_size, flags):
        results = {}
        for before, (folder, _) in states.items():
            words = [*ARCHITECTURES["moe"], "--store-ema", "--restore-file", str(folder), *flags]
            home = tmp_path / before.replace(" ", "_")
            trainer = make_trainer(
                data, home, [*words, "--no-save"], updates=SAVED + MORE, data_size=data_size
            )
            trainer.resume()
            state = state_of(trainer)
            results[before] = state, train(trainer)
        return results

    ranks = run_at(after, work)
    reference = states["one"][1]
    for before, (_, expected) in states.items():
        loaded = ranks[0][before][0]
        assert loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor), f"{name}, from {before} to {after}"
        assert reference.keys() == expected.keys()
        read = sorted(i for results in ranks for i in results[before][1].sample_ids)
        first = SAVED * BATCHES * 2
        size, data_size, _ = LAYOUTS[after]
        samples = list(range(first, first + MORE * BATCHES * 2))
        assert read == sorted(samples * (size // data_size))
    losses = [ranks[0][before][1].losses for before in states]
    assert all(found == pytest.approx(losses[0], rel=1e-5) for found in losses)
