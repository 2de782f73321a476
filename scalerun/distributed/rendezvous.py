"""Where the processes of a job meet, read from what their launcher tells them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from scalerun.dataclass.configs import DistributedConfig
from scalerun.dataclass.errors import ConfigError, UserError

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process in its environment."""
SLURM_PORTS = (20000, 10000)
"""First port, and number of ports, that jobs without ``--distributed-port`` are spread over."""


@dataclass(frozen=True)
class Rendezvous:
    """Which of several processes this one is, and where they meet."""

    rank: int
    world_size: int
    local_rank: int
    """Among the processes of this host: the number of its GPU."""
    address: str
    """Of the host of the store."""
    port: int
    hosts_store: bool
    """Whether this process keeps the store, rather than a launcher."""
    attempt: str = "0"
    """Counts the restarts of a launcher that keeps its store."""


def find_rendezvous(
    cfg: DistributedConfig, environment: Mapping[str, str] = os.environ
) -> Rendezvous | None:
    """What torchrun or Slurm says of this process; None if neither started it.

    Raises:
        ConfigError: the launcher's number of processes is not ``--distributed-world-size``.
    """
    found = _torchrun(environment) or _slurm(cfg, environment)
    wanted = cfg.distributed_world_size
    if found is not None and wanted is not None and wanted != found.world_size:
        raise ConfigError(
            f"--distributed-world-size is {wanted}, but the launcher started {found.world_size} "
            "processes; leave the flag out"
        )
    return found


def _torchrun(environment: Mapping[str, str]) -> Rendezvous | None:
    given = [name for name in LAUNCHED if name in environment]
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return None
    missing = sorted(set(LAUNCHED) - set(given))
    if missing:
        raise ConfigError(
            f"{given[0]} is set in the environment, but {', '.join(missing)} is not; start with "
            "torchrun, or unset it"
        )
    return Rendezvous(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=int(environment["LOCAL_RANK"]),
        address=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        # The agent of torchrun may keep the store, which it then uses again after a restart.
        hosts_store=environment["RANK"] == "0"
        and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _slurm(cfg: DistributedConfig, environment: Mapping[str, str]) -> Rendezvous | None:
    """One process per task of an ``srun`` step; ``MASTER_ADDR`` and ``MASTER_PORT`` may be set."""
    world_size = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if world_size == 1 or "SLURM_PROCID" not in environment:
        return None
    first, count = SLURM_PORTS
    port = environment.get("MASTER_PORT") or first + int(environment["SLURM_JOB_ID"]) % count
    rank = int(environment["SLURM_PROCID"])
    return Rendezvous(
        rank=rank,
        world_size=world_size,
        local_rank=int(environment["SLURM_LOCALID"]),
        address=environment.get("MASTER_ADDR") or _first_host(environment["SLURM_STEP_NODELIST"]),
        port=cfg.distributed_port or int(port),
        hosts_store=rank == 0,
        attempt=environment.get("SLURM_RESTART_COUNT", "0"),
    )


def _first_host(nodes: str) -> str:
    if not any(mark in nodes for mark in "[,"):
        return nodes
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(
            f"'{' '.join(command)}' failed, so the hosts are not known; set MASTER_ADDR to the "
            "first one"
        ) from error
    return listed.split()[0]
