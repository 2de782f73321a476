"""Seeds are a function of the place in the run."""

import itertools

import pytest
import torch

from scalerun.dataclass.errors import ConfigError
from scalerun.distributed.launch import choose_device, refuse_many_processes, seed_forward


def draw(*place):
    seed_forward(*place)
    return torch.rand(4)


def test_equal_places_draw_equal_numbers_and_others_do_not():
    places = list(itertools.product((1, 2), (0, 1, 11), (0, 1), (0, 1)))
    drawn = {place: draw(*place) for place in places}
    for place in places:
        assert torch.equal(drawn[place], draw(*place))
    assert len({tuple(numbers.tolist()) for numbers in drawn.values()}) == len(places)


def test_the_cpu_can_be_forced():
    assert choose_device(cpu=True).type == "cpu"


def test_one_of_several_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 8"):
        refuse_many_processes()
    monkeypatch.setenv("WORLD_SIZE", "1")
    refuse_many_processes()
