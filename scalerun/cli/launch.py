"""Runs a command's work on every rank, whoever starts them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from scalerun.cli.entry import outcome, print_error
from scalerun.dataclass.configs import DistributedConfig
from scalerun.dataclass.errors import UserError
from scalerun.distributed.launch import (
    choose_device,
    end_process,
    join,
    leave,
)
from scalerun.distributed.local_ranks import run_local_ranks
from scalerun.distributed.mesh import parallel_dims
from scalerun.distributed.ranks import ALONE, Ranks
from scalerun.distributed.rendezvous import Rendezvous, find_rendezvous

C10D = torch.distributed.distributed_c10d.__file__
"""Where torch's collectives are: the innermost frame in it names the one that failed."""

Work = Callable[[Ranks], int]
"""What each rank does; gives its exit code."""


def on_every_rank(
    cfg: DistributedConfig, work: Work, *, cpu: bool, settings: Mapping[str, Any]
) -> int:
    """Do the work in this process, in processes started here, or as one of a launcher's.

    Args:
        cpu: compute on the CPU even where there are GPUs.
        settings: must be the same on every rank.

    Returns:
        The exit code. A process that a launcher started ends in here.

    Raises:
        UserError: what a rank raised.
    """
    place = find_rendezvous(cfg)
    world_size = place.world_size if place else cfg.distributed_world_size or 1
    parallel_dims(cfg, world_size)  # refused before any process starts
    if world_size == 1:
        return work(ALONE)

    def here(place: Rendezvous) -> int:
        device = choose_device(cpu=cpu, local_rank=place.local_rank)
        return as_rank(work, lambda: join(place, cfg, device, settings=settings))

    if place is not None:
        code, error = outcome(lambda: here(place))
        if error is not None:
            print_error(error, place)
        end_process(code)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max((os.cpu_count() or 1) // world_size, 1))
    code, error = run_local_ranks(world_size, lambda place: outcome(lambda: here(place)))
    if error is not None:
        failure = UserError(error)
        failure.exit_code = code
        raise failure
    return code


def as_rank(work: Work, meet: Callable[[], Ranks]) -> int:
    """Meet the others, do the work, leave them."""
    ranks = meet()
    try:
        code = work(ranks)
        leave(ranks)
    except RuntimeError as error:
        collectives = [
            frame.name
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == C10D
        ]
        if not collectives:
            raise  # a fault of this rank's own
        raise UserError(describe_lost(collectives[-1], ranks)) from error
    return code


def describe_lost(collective: str, ranks: Ranks) -> str:
    """What this rank waited for in vain, and how far the others were."""
    seen = ", ".join(f"rank {rank} in {at}" for rank, at in sorted(ranks.places().items()))
    return (
        f"lost the other ranks in {collective} ({seen or 'nothing is known of any rank'}); "
        "look at the ranks that are behind or gone, or raise --distributed-timeout-seconds"
    )
