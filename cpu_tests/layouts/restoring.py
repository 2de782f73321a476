"""Saving at some layouts and going on at others."""

import pytest
import torch

from cpu_tests.layouts.layouts import EVERY_LAYOUT
from cpu_tests.layouts.training import ARCHITECTURES, BATCHES, make_trainer, train, whole
from cpu_tests.world import run_world
from scalerun.checkpoint.state_tree import flatten_tensors, split_state

SAVED, MORE = 3, 2
"""Updates before and after."""


def run_at(name, work):
    """Call ``work(layout)`` on each rank of a layout -> the results of all ranks."""
    layout = EVERY_LAYOUT[name]
    if layout.size == 1:
        return [work(layout)]
    return run_world(layout.size, lambda rank: work(layout), timeout=600)


def state_of(trainer):
    """All tensors of a run, whole."""
    parts = {part: split_state(owner.state_dict())[0] for part, owner in trainer.stateful().items()}
    return {name: whole(tensor) for name, tensor in flatten_tensors(parts).items()}


def save_at(names, architecture, data, home):
    """Train and save at each layout -> its run folder, and the state that was saved, by name."""
    states = {}
    for name in names:
        folder = home / name.replace(" ", "_")

        def work(layout, folder=folder):
            words = [*ARCHITECTURES[architecture], "--store-ema", *layout.flags]
            trainer = make_trainer(data, folder, words, updates=SAVED, data_size=layout.data_size)
            train(trainer)
            return state_of(trainer)

        states[name] = (folder, run_at(name, work)[0])
    return states


def check_after(after, architecture, data, states, home):
    """Go on from each saved state at one layout."""

    def work(layout):
        results = {}
        for before, (folder, _) in states.items():
            words = [*ARCHITECTURES[architecture], "--store-ema", *layout.flags, "--no-save"]
            trainer = make_trainer(
                data,
                home / before.replace(" ", "_"),
                [*words, "--restore-file", str(folder)],
                updates=SAVED + MORE,
                data_size=layout.data_size,
            )
            trainer.resume()
            state = state_of(trainer)
            results[before] = state, train(trainer)
        return results

    ranks = run_at(after, work)
    for before, (_, expected) in states.items():
        loaded = ranks[0][before][0]
        assert loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor), f"{name}, from {before} to {after}"
        read = sorted(i for results in ranks for i in results[before][1].sample_ids)
        first = SAVED * BATCHES * 2
        copies = EVERY_LAYOUT[after].size // EVERY_LAYOUT[after].data_size
        assert read == sorted(list(range(first, first + MORE * BATCHES * 2)) * copies)
    losses = [ranks[0][before][1].losses for before in states]
    assert all(found == pytest.approx(losses[0], rel=1e-5) for found in losses)
