"""How a process starts: device, seeds."""

from __future__ import annotations

import os
import zlib

import torch

from scalerun.dataclass.errors import ConfigError


def refuse_many_processes() -> None:
    """Stop when a launcher started several processes: each would train the same model alone.

    Raises:
        ConfigError: the environment says that this process is one of several.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, but this version trains in one process; start it without "
            "torchrun"
        )


def choose_device(*, cpu: bool) -> torch.device:
    """The device to compute on: a GPU where there is one, unless ``--cpu`` is given."""
    if torch.cuda.is_available() and not cpu:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def seed_forward(seed: int, update: int, batch: int, data_rank: int = 0) -> None:
    """Set torch's generators for one forward and backward pass.

    Dropout is thereby a function of the seed and the place in the run; nothing has to be saved for
    a resumed run to draw the same masks.

    Args:
        update: finished updates.
        batch: index of the batch in its update.
    """
    torch.manual_seed(zlib.crc32(f"{seed}/{update}/{batch}/{data_rank}".encode()))
