"""How processes find each other, and the seeds of their forward passes."""

import itertools

import pytest
import torch

from cpu_tests.world import run_world
from scalerun.dataclass.configs import DistributedConfig
from scalerun.dataclass.errors import ConfigError
from scalerun.distributed.launch import (
    choose_device,
    find_rendezvous,
    interface_towards,
    refuse_unequal,
    seed_forward,
)
from scalerun.distributed.ranks import Control

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "first.host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node7",
    "SLURM_JOB_ID": "120034",
}


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


def test_without_a_launcher_there_is_no_rendezvous():
    assert find_rendezvous(DistributedConfig(), {"PATH": "/bin"}) is None
    # The shell of a Slurm job is no step of it.
    assert find_rendezvous(DistributedConfig(), {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None


def test_torchrun_is_believed():
    place = find_rendezvous(DistributedConfig(), TORCHRUN)
    assert (place.rank, place.world_size, place.local_rank) == (3, 8, 1)
    assert (place.address, place.port) == ("first.host", 29500)
    assert not place.hosts_store
    assert place.attempt == "2"
    own = {**TORCHRUN, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert find_rendezvous(DistributedConfig(), own).hosts_store


def test_a_step_of_slurm_is_believed():
    place = find_rendezvous(DistributedConfig(), SLURM)
    assert (place.rank, place.world_size, place.local_rank) == (0, 4, 0)
    assert place.address == "node7"
    assert 20000 <= place.port < 30000
    assert place.hosts_store
    assert find_rendezvous(DistributedConfig(distributed_port=4711), SLURM).port == 4711


def test_the_device_that_leads_to_an_address_is_found():
    assert interface_towards("127.0.0.1", 9) == "lo"
    assert interface_towards("no-such-host.invalid", 9) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK is set in the environment, but LOCAL_RANK",
        ),
        (TORCHRUN, "--distributed-world-size is 2, but the launcher started 8"),
    ],
)
def test_what_contradicts_is_refused(environment, message):
    with pytest.raises(ConfigError, match=message):
        find_rendezvous(DistributedConfig(distributed_world_size=2), environment)


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
