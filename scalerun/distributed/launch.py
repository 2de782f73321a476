"""How a process starts and ends: device, seeds, the processes it trains with."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import zlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch

from scalerun.dataclass.configs import DistributedConfig
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.distributed.common_error import meet, open_store
from scalerun.distributed.mesh import build_meshes, parallel_dims
from scalerun.distributed.ranks import Control, Ranks
from scalerun.distributed.rendezvous import Rendezvous

FLIGHT_RECORDER = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
"""NCCL then remembers its last collectives, and writes them to a file where one times out."""
_SIOCGIFADDR = 0x8915
"""Linux's request for the address of a network device (netdevice(7))."""


def join(
    rendezvous: Rendezvous,
    cfg: DistributedConfig,
    device: torch.device,
    *,
    settings: Mapping[str, Any],
) -> Ranks:
    """Meet the other processes; :func:`leave` them at the end.

    Args:
        settings: must be the same on every rank.

    Raises:
        ConfigError: the degrees of parallelism do not fit the number of processes, or settings
            differ.
        UserError: the others did not come.
    """
    parallel_dims(cfg, rendezvous.world_size)
    for name, value in FLIGHT_RECORDER.items():
        os.environ.setdefault(name, value)
    interface = interface_towards(rendezvous.address, rendezvous.port)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    timeout = timedelta(seconds=cfg.distributed_timeout_seconds)
    rank, world_size = rendezvous.rank, rendezvous.world_size
    dist = torch.distributed
    try:
        store = open_store(rendezvous, timeout)
        meet(store, world_size, timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        return form_ranks(cfg, device.type, local_rank=rendezvous.local_rank, settings=settings)
    except RuntimeError as error:  # the store's, and those of the connections between ranks
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"port {rendezvous.port} of this host, where the ranks were to meet, is in use; "
                "choose another with --distributed-port, or with MASTER_PORT where you set it"
            ) from error
        raise UserError(
            f"the other {world_size - 1} ranks could not be met at {rendezvous.address}:"
            f"{rendezvous.port} within {cfg.distributed_timeout_seconds} s; see that all were "
            "started and reach that host and each other, or raise --distributed-timeout-seconds "
            f"({first_line(error)})"
        ) from error


def first_line(error: Exception) -> str:
    """What an error says, without the stack that torch adds."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def interface_towards(address: str, port: int) -> str | None:
    """The network device by which this host reaches an address; None where it cannot be told.

    Gloo left alone takes the address of the host's own name. Where that is 127.0.1.1, as on many
    installations, no other host can reach it.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))  # sends nothing
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # a device without an address
                    answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                    if socket.inet_ntoa(answer[20:24]) == own:
                        return name
    except OSError:
        pass
    return None


def form_ranks(
    cfg: DistributedConfig,
    device_type: str,
    *,
    local_rank: int,
    settings: Mapping[str, Any] | None = None,
) -> Ranks:
    """The axes and channels of a process group that is there; every process calls it.

    Args:
        settings: must be the same on every rank.

    Raises:
        ConfigError: the degrees of parallelism do not fit the number of processes, or settings
            differ.
    """
    dist = torch.distributed
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dims = parallel_dims(cfg, world_size)
    timeout = timedelta(seconds=cfg.distributed_timeout_seconds)
    control, saving = (
        Control(rank, world_size, dist.new_group(backend="gloo", timeout=timeout)) for _ in range(2)
    )
    # First, as ranks that want other meshes would wait for each other.
    refuse_unequal(settings or {}, control)
    meshes = build_meshes(dims, device_type, sequence_parallel=cfg.sequence_parallel)
    return Ranks(
        dims,
        control=control,
        saving=saving,
        meshes=meshes,
        local_rank=local_rank,
        store=dist.PrefixStore("places", dist.distributed_c10d._get_default_store()),
    )


def leave(ranks: Ranks) -> None:
    """Wait for the others and take the process group down; then :func:`end_process`."""
    if ranks.size > 1:
        ranks.control.barrier()
        torch.distributed.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """End at once, without the interpreter's own teardown, in which threads of gloo may abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse_unequal(settings: Mapping[str, Any], control: Control) -> None:
    """Stop where the ranks were not given the same settings.

    Raises:
        ConfigError: names the first difference.
    """
    first, *others = control.gather(dict(_leaves(settings)))
    for rank, other in enumerate(others, start=1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise ConfigError(
                    f"rank 0 was given --{name.replace('_', '-')} {first.get(name)} and rank "
                    f"{rank} {other.get(name)}; give every rank the same command"
                )


def _leaves(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found = []
    for name, value in settings.items():
        found += _leaves(value) if isinstance(value, Mapping) else [(name, value)]
    return found


def choose_device(*, cpu: bool, local_rank: int = 0) -> torch.device:
    """The device to compute on: a GPU where there is one, unless ``--cpu`` is given.

    Args:
        local_rank: number of the GPU.

    Raises:
        UserError: there are fewer GPUs than processes on this host.
    """
    if cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"this host has {count} GPUs and was given a process for GPU {local_rank}; start at "
            f"most {count} processes on it"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def seed_forward(seed: int, update: int, batch: int) -> None:
    """Set torch's generators for one forward and backward pass.

    Dropout is thereby a function of the seed and the place in the run; nothing has to be saved for
    a resumed run to draw the same masks, and other ranks that read the same batch draw the same.

    Args:
        update: finished updates.
        batch: index of the batch among those of all ranks in its update.
    """
    torch.manual_seed(zlib.crc32(f"{seed}/{update}/{batch}".encode()))
