"""Runs a command's work on every rank, whoever starts them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import torch

from scalerun.cli.entry import outcome, print_error
from scalerun.dataclass.configs import ScalerunConfig
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


def on_every_rank(cfg: ScalerunConfig, work: Work) -> int:
    """Do the work in this process, in processes started here, or as one of a launcher's.

    Returns:
        The exit code. A process that a launcher started ends in here.

    Raises:
        UserError: what a rank raised.
    """
    place = find_rendezvous(cfg.distributed)
    world_size = place.world_size if place else cfg.distributed.distributed_world_size or 1
    parallel_dims(cfg.distributed, world_size)  # refused before any process starts
    if world_size == 1:
        return work(ALONE)
    if place is not None:
        code, error = outcome(lambda: as_rank(cfg, place, work))
        if error is not None:
            print_error(error, place)
        end_process(code)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max((os.cpu_count() or 1) // world_size, 1))
    code, error = run_local_ranks(
        world_size, lambda place: outcome(lambda: as_rank(cfg, place, work))
    )
    if error is not None:
        failure = UserError(error)
        failure.exit_code = code
        raise failure
    return code


def as_rank(cfg: ScalerunConfig, place: Rendezvous, work: Work) -> int:
    """Meet the others, do the work, leave them."""
    device = choose_device(cpu=cfg.common.cpu, local_rank=place.local_rank)
    ranks = join(place, cfg.distributed, device, settings=cfg.to_dict())
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
