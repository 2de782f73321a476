"""A small state, and managers over a temporary run folder."""

import pytest
import torch

from scalerun.checkpoint.checkpoint_manager import CheckpointManager
from scalerun.dataclass.configs import CheckpointConfig


class Box:
    """The plainest object with a state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def state_at(number):
    """A state that says which update it belongs to, in every part of it."""
    return {
        "model": Box({"embed.weight": torch.full((7, 5), float(number)), "scale": torch.ones(())}),
        "optimizer": Box({"embed.weight.exp_avg": torch.full((7, 5), 0.5 * number)}),
        "trainer": Box({"num_updates": number, "nested": {"third": number / 3}}),
    }


def number_of(state):
    """The update that a state belongs to; a mixture is an error."""
    number = state["trainer"].state["num_updates"]
    assert state["trainer"].state["nested"]["third"] == number / 3
    assert (state["model"].state["embed.weight"] == number).all()
    assert (state["optimizer"].state["embed.weight.exp_avg"] == 0.5 * number).all()
    return number


@pytest.fixture(name="Box")
def box():
    return Box


@pytest.fixture(name="state_at")
def state_at_fixture():
    return state_at


@pytest.fixture(name="number_of")
def number_of_fixture():
    return number_of


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def manager(run_dir):
    """Make managers over one run folder; they are closed at the end."""
    managers = []

    def make(on_event=None, run_files=None, save_dir=run_dir, **settings):
        cfg = CheckpointConfig(save_dir=str(save_dir), **settings)
        managers.append(CheckpointManager(cfg, on_event=on_event, run_files=run_files))
        return managers[-1]

    yield make
    for made in managers:
        made.close()


@pytest.fixture
def saved(manager, run_dir):
    """Save some updates and return the run folder."""

    def save(*numbers, **settings):
        made = manager(**settings)
        for number in numbers:
            made.save(number, state_at(number))
        made.close()
        return run_dir

    return save


def flip_byte(path):
    """Damage a file without changing its size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.fixture(name="flip_byte")
def flip_byte_fixture():
    return flip_byte
