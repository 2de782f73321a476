"""Which rank a process is, and where it meets the others."""

import pytest

from scalerun.dataclass.configs import DistributedConfig
from scalerun.dataclass.errors import ConfigError
from scalerun.distributed.rendezvous import find_rendezvous

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


def test_a_container_without_slurms_commands_is_told_the_first_host():
    told = {"SLURM_STEP_NODELIST": "node[7-8]", "MASTER_ADDR": "node7", "MASTER_PORT": "2001"}
    place = find_rendezvous(DistributedConfig(), {**SLURM, **told})
    assert (place.address, place.port) == ("node7", 2001)


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
