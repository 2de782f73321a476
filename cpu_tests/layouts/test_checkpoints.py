"""A checkpoint of any layout goes on at any other: the same bytes, then the same numbers."""

import pytest
import torch

from cpu_tests.layouts.layouts import EVERY_LAYOUT
from cpu_tests.layouts.restoring import SAVED, check_after, save_at
from cpu_tests.layouts.training import make_data
from scalerun.checkpoint.consolidation import weight_entries
from scalerun.checkpoint.manifest import read_manifest

NAMES = (
    "one",
    "shard 2",
    "copies 4 x expert 2",
    "tensor 2 x expert 2",
)
"""Some of each kind; ``test_matrix.py`` has all."""
PAIRED = ("one", "copies 2", "shard 2 x tensor 2")
"""The same for an encoder-decoder."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The data, a run folder for each layout, and its state when it was saved."""
    home = tmp_path_factory.mktemp("saved")
    data = make_data(home / "data")
    return data, save_at(NAMES, "moe", data, home)


def test_the_manifest_says_how_many_wrote(saved):
    for layout, (folder, _) in saved[1].items():
        manifest = read_manifest(folder / f"checkpoint_{SAVED}")
        assert manifest.world_size == EVERY_LAYOUT[layout].size
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


@pytest.mark.parametrize("after", NAMES)
def test_every_byte_and_the_next_losses_are_the_same(after, saved, tmp_path):
    data, states = saved
    check_after(after, "moe", data, states, tmp_path)


@pytest.mark.long
def test_an_encoder_decoder_goes_on_at_every_layout(tmp_path):
    data = make_data(tmp_path / "data")
    states = save_at(PAIRED, "encoder-decoder", data, tmp_path)
    for after in PAIRED:
        check_after(after, "encoder-decoder", data, states, tmp_path / "after")
