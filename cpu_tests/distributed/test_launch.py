"""How processes find each other, and the seeds of their forward passes."""

import itertools
import socket

import pytest
import torch

from cpu_tests.world import run_world
from scalerun.dataclass.configs import DistributedConfig
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.distributed.launch import (
    choose_device,
    interface_towards,
    join,
    refuse_unequal,
    seed_forward,
)
from scalerun.distributed.ranks import Control
from scalerun.distributed.rendezvous import Rendezvous


def draw(*place):
    seed_forward(*place)
    return torch.rand(4)


def test_equal_places_draw_equal_numbers_and_others_do_not():
    places = list(itertools.product((1, 2), (0, 1, 11), (0, 1, 5)))
    drawn = {place: draw(*place) for place in places}
    for place in places:
        assert torch.equal(drawn[place], draw(*place))
    assert len({tuple(numbers.tolist()) for numbers in drawn.values()}) == len(places)


def test_the_cpu_can_be_forced():
    assert choose_device(cpu=True).type == "cpu"


def test_the_device_that_leads_to_an_address_is_found():
    assert interface_towards("127.0.0.1", 9) == "lo"
    assert interface_towards("no-such-host.invalid", 9) is None


def test_unequal_flags_are_refused_by_name_on_every_rank():
    def work(rank):
        control = Control(rank, 2, torch.distributed.group.WORLD)
        refuse_unequal({"optimization": {"lr": 0.1, "max_update": 3}}, control)
        with pytest.raises(ConfigError) as caught:
            refuse_unequal({"optimization": {"lr": 0.1, "max_update": 3 + rank}}, control)
        return str(caught.value)

    first, second = run_world(2, work)
    assert first == second
    assert first.startswith("rank 0 was given --max-update 3 and rank 1 4")


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = Rendezvous(0, 2, 0, "127.0.0.1", port, hosts_store=True)
        cfg = DistributedConfig(distributed_timeout_seconds=5)
        with pytest.raises(UserError, match=f"^port {port} of this host, .* is in use; choose"):
            join(place, cfg, torch.device("cpu"), settings={})
