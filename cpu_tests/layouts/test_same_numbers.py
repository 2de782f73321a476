"""Every layout trains the same model: losses, norms and gradients are those of one process."""

import pytest
import torch

from cpu_tests.conftest import make_corpus
from cpu_tests.layouts.training import ARCHITECTURES, make_trainer, train
from cpu_tests.world import run_world

UPDATES = 5
ALL = tuple(ARCHITECTURES)
TENSOR = ["--model-parallel-size", "2"]
SEQUENCE = ["--seq-parallel-size", "2"]
LAYOUTS = {
    "shard 2": (2, 2, [], ALL),
    "copies 2": (2, 2, ["--ddp-backend", "pytorch_ddp"], ALL),
    "copies 2 x shard 2": (4, 4, ["--replicate-size", "2", "--no-reshard-after-forward"], ALL),
    "expert 2": (2, 2, ["--expert-parallel-size", "2"], ("moe",)),
    "copies 4 x expert 2": (
        4,
        4,
        ["--expert-parallel-size", "2", "--ddp-backend", "pytorch_ddp"],
        ("moe",),
    ),
    "tensor 2": (2, 1, TENSOR, ALL),
    "copies 2 x tensor 2": (4, 2, [*TENSOR, "--ddp-backend", "pytorch_ddp"], ("dense",)),
    "shard 2 x tensor 2": (4, 2, [*TENSOR, "--sequence-parallel"], ALL),
    "tensor 2 x expert 2": (
        4,
        2,
        [*TENSOR, "--sequence-parallel", "--expert-parallel-size", "2"],
        ("moe",),
    ),
    "sequence 2": (2, 1, [*SEQUENCE, "--ddp-backend", "pytorch_ddp"], ("longnet",)),
    "sequence 2 x shard 2": (4, 2, SEQUENCE, ("longnet",)),
    "sequence 4": (4, 1, ["--seq-parallel-size", "4"], ("longnet",)),
    "sequence 2 x tensor 2": (4, 1, [*SEQUENCE, *TENSOR, "--sequence-parallel"], ("longnet",)),
}
"""Ranks, those of them that read other batches, flags, and for which architectures."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The runs of one process, by architecture."""
    home = tmp_path_factory.mktemp("alone")
    data = make_corpus(home / "data")
    runs = {
        name: train(make_trainer(data, home / name, [*words, "--no-save"], updates=UPDATES))
        for name, words in ARCHITECTURES.items()
    }
    return data, runs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_no_number(layout, alone, tmp_path):
    data, expected = alone
    size, data_size, flags, names = LAYOUTS[layout]

    def work(rank):
        return {
            name: train(
                make_trainer(
                    data,
                    tmp_path / name,
                    [*ARCHITECTURES[name], *flags, "--no-save"],
                    updates=UPDATES,
                    data_size=data_size,
                )
            )
            for name in names
        }

    results = run_world(size, work)
    for name in names:
        reference = expected[name]
        agree(reference, results[0][name], f"{name} at {layout}")
        read = sorted(i for run in results for i in run[name].sample_ids)
        assert read == sorted(reference.sample_ids * (size // data_size))


def agree(expected, found, what):
    norm = torch.stack([grad.norm() for grad in expected.gradients.values()]).norm()
    assert found.gradients.keys() == expected.gradients.keys(), what
    for name, gradient in expected.gradients.items():
        difference = (found.gradients[name] - gradient).norm() / norm
        assert difference < 1e-5, f"{what}: {name} differs by {difference}"
    assert found.losses == pytest.approx(expected.losses, rel=1e-5), what
    assert found.norms == pytest.approx(expected.norms, rel=1e-4), what
