"""Every layout trains the same model: losses, norms and gradients are those of one process."""

import pytest

from cpu_tests.layouts.layouts import LAYOUTS, agree, train_at
from cpu_tests.layouts.training import make_data
from cpu_tests.world import run_world

UPDATES = 5


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The runs of one process, by architecture."""
    home = tmp_path_factory.mktemp("alone")
    data = make_data(home / "data")
    return data, train_at(LAYOUTS["one"], data, home, updates=UPDATES)


def cases():
    """Every layout of several ranks; more than two of them take long."""
    for name, layout in LAYOUTS.items():
        if layout.size > 1:
            yield pytest.param(name, marks=[pytest.mark.long] if layout.size > 2 else [])


@pytest.mark.parametrize("name", cases())
def test_a_layout_changes_no_number(name, alone, tmp_path):
    data, expected = alone
    layout = LAYOUTS[name]
    results = run_world(layout.size, lambda rank: train_at(layout, data, tmp_path, updates=UPDATES))
    for architecture in layout.architectures:
        reference = expected[architecture]
        agree(reference, results[0][architecture], architecture, f"at {name}")
        read = sorted(i for runs in results for i in runs[architecture].sample_ids)
        assert read == sorted(reference.sample_ids * (layout.size // layout.data_size))
