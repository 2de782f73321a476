"""The layouts that tests train at, and what has to be the same at all of them."""

from dataclasses import dataclass

import pytest
import torch

from cpu_tests.layouts.training import ARCHITECTURES, make_trainer, train

ALL = tuple(ARCHITECTURES)
MOST = tuple(name for name in ALL if name != "encoder-decoder, moe")
"""Without what no part of is new to a layout that spreads no experts."""
TENSOR = ("--model-parallel-size", "2")
EXPERT = ("--expert-parallel-size", "2")
SEQUENCE = ("--seq-parallel-size", "2")
COPIES = ("--ddp-backend", "pytorch_ddp")


@dataclass(frozen=True)
class Layout:
    """Some ranks, and what they share."""

    size: int
    """Ranks."""
    data_size: int
    """Those of them that read other batches."""
    flags: tuple[str, ...] = ()
    architectures: tuple[str, ...] = MOST


LAYOUTS = {
    "one": Layout(1, 1, architectures=ALL),
    "shard 2": Layout(2, 2),
    "copies 2": Layout(2, 2, COPIES),
    "tensor 2": Layout(2, 1, TENSOR),
    "tensor 2, spread tokens": Layout(2, 1, (*TENSOR, "--sequence-parallel"), ("encoder-decoder",)),
    "expert 2": Layout(2, 2, EXPERT, ("moe", "encoder-decoder, moe")),
    "copies 2 x shard 2": Layout(4, 4, ("--replicate-size", "2", "--no-reshard-after-forward")),
    "copies 2 x tensor 2": Layout(4, 2, (*TENSOR, *COPIES), ("dense",)),
    "copies 4 x expert 2": Layout(4, 4, (*EXPERT, *COPIES), ("moe",)),
    "shard 2 x tensor 2": Layout(4, 2, (*TENSOR, "--sequence-parallel")),
    "tensor 2 x expert 2": Layout(
        4, 2, (*TENSOR, *EXPERT, "--sequence-parallel"), ("moe", "encoder-decoder, moe")
    ),
    "sequence 2": Layout(2, 1, (*SEQUENCE, *COPIES), ("longnet",)),
    "sequence 2 x shard 2": Layout(4, 2, SEQUENCE, ("longnet",)),
    "sequence 2 x tensor 2": Layout(
        4, 1, (*SEQUENCE, *TENSOR, "--sequence-parallel"), ("longnet",)
    ),
}
"""Those of every run of the tests."""

MORE_LAYOUTS = {
    "shard 4": Layout(4, 4),
    "shard 4, offloaded": Layout(4, 4, ("--cpu-offload",), ("dense",)),
    "copies 4": Layout(4, 4, COPIES),
    "tensor 4": Layout(4, 1, ("--model-parallel-size", "4"), ("dense", "subln", "longnet", "moe")),
    "shard 2 x tensor 2, whole tokens": Layout(4, 2, TENSOR),
    "expert 2 of shards 4": Layout(4, 4, EXPERT, ("moe",)),
    "expert 4": Layout(4, 4, ("--expert-parallel-size", "4"), ("moe",)),
    "sequence 4": Layout(4, 1, ("--seq-parallel-size", "4"), ("longnet",)),
}
"""Those that the full matrix adds."""
EVERY_LAYOUT = LAYOUTS | MORE_LAYOUTS


def train_at(layout, data, home, *, updates, words=()):
    """This rank's runs of the layout's architectures."""
    runs = {}
    for name in layout.architectures:
        argv = [*ARCHITECTURES[name], *layout.flags, *words, "--no-save"]
        made = make_trainer(data, home / name, argv, updates=updates, data_size=layout.data_size)
        runs[name] = train(made)
    return runs


NORM_TOLERANCES = {"retnet": 1e-2}
"""Relative; else a ten-thousandth. The norm over a RetNet's heads is steep
where they are near 0: in a gradient of six times the usual norm, so are rounding errors."""


def agree(expected, found, architecture, where):
    what = f"{architecture}, {where}"
    norm = torch.stack([grad.norm() for grad in expected.gradients.values()]).norm()
    assert found.gradients.keys() == expected.gradients.keys(), what
    for name, gradient in expected.gradients.items():
        difference = (found.gradients[name] - gradient).norm() / norm
        assert difference < 1e-5, f"{what}: {name} differs by {difference}"
    assert found.losses[:5] == pytest.approx(expected.losses[:5], rel=1e-5), what
    assert found.losses == pytest.approx(expected.losses, rel=1e-4), what
    tolerance = NORM_TOLERANCES.get(architecture, 1e-4)
    assert found.norms == pytest.approx(expected.norms, rel=tolerance), what
    assert found.sizes == expected.sizes, what
    valid, tokens = zip(*expected.valid, strict=True)
    assert [loss for loss, _ in found.valid] == pytest.approx(valid, rel=1e-4), what
    assert tuple(number for _, number in found.valid) == tokens, what
