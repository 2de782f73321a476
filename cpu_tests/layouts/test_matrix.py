"""Every architecture at every layout, over more updates: ``make test-layouts``."""

import pytest

from cpu_tests.layouts import test_deterministic_reduce
from cpu_tests.layouts.layouts import EVERY_LAYOUT, agree, train_at
from cpu_tests.layouts.restoring import check_after, save_at
from cpu_tests.layouts.training import ARCHITECTURES, make_data
from cpu_tests.world import run_world

pytestmark = [pytest.mark.layouts, pytest.mark.timeout(3000)]

UPDATES = 20
CALM = ("--lr", "0.001")
"""At ten times the rate, training by itself makes a hundred times more of a rounding error in ten
updates."""
VARIANTS = {
    "plain": CALM,
    "frozen": (*CALM, "--freeze-params", "*layers.0.*"),
    "recomputed": (*CALM, "--checkpoint-activations"),
    "without logits": (*CALM, "--cross-entropy-chunk-tokens", "8"),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The data, and the runs of one process by variant."""
    home = tmp_path_factory.mktemp("alone")
    data = make_data(home / "data")
    runs = {
        variant: train_at(
            EVERY_LAYOUT["one"],
            data,
            home / variant.replace(" ", "_"),
            updates=UPDATES,
            words=words,
        )
        for variant, words in VARIANTS.items()
    }
    return data, runs


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [name for name in EVERY_LAYOUT if name != "one"])
def test_20_updates_are_those_of_one_process(name, variant, alone, tmp_path):
    data, expected = alone
    layout = EVERY_LAYOUT[name]
    words = VARIANTS[variant]
    results = run_world(
        layout.size,
        lambda rank: train_at(layout, data, tmp_path, updates=UPDATES, words=words),
        timeout=1200,
    )
    for architecture in layout.architectures:
        reference = expected[variant][architecture]
        agree(reference, results[0][architecture], architecture, f"{variant}, at {name}")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_checkpoints_of_every_layout_go_on_at_every_other(architecture, tmp_path):
    names = [name for name, layout in EVERY_LAYOUT.items() if architecture in layout.architectures]
    data = make_data(tmp_path / "data")
    states = save_at(names, architecture, data, tmp_path)
    for after in names:
        check_after(after, architecture, data, states, tmp_path / "after")


def test_eight_ranks_give_the_bits_of_one(tmp_path):
    layouts = {"shard 8": (8, []), "copies 8": (8, ["--ddp-backend", "pytorch_ddp"])}
    test_deterministic_reduce.check(tmp_path, 100, layouts)
