"""Random numbers where ranks hold parts of one tensor.

The default generators are in the same state on all ranks of a tensor axis, and stay so.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from scalerun.distributed.collectives import alone, own_part

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


def spread_dropout(x: Tensor, rate: float, mesh: DeviceMesh, dim: int) -> Tensor:
    """Dropout of a spread tensor by the mask that the whole one would have had.

    Each rank draws the whole mask and keeps its part, so that the result does not depend on the
    number of ranks; that takes the memory of a whole tensor for a moment.

    Args:
        x: this rank's part, contiguous.
        rate: probability of 0; the rest is scaled by ``1 / (1 - rate)``.
        mesh: axis that the tensor is spread over.
        dim: dimension that is spread.
    """
    shape = list(x.shape)
    shape[dim] *= mesh.size()
    mask = F.dropout(x.new_ones(shape), rate)
    return x * own_part(mask, mesh, dim)


@contextlib.contextmanager
def rank_stream(mesh: DeviceMesh | None, device: torch.device) -> Iterator[None]:
    """Inside, each rank of the axis draws numbers of its own.

    They follow from the state of the default CPU generator, which moves on by one number whatever
    is drawn inside. So they are a function of the seed and the place in the run, and recomputing a
    block draws them again.

    Args:
        mesh: None or a single rank changes nothing.
        device: where the numbers are drawn.
    """
    if mesh is None or alone(mesh):
        yield
        return
    key = int(torch.randint(2**62, ()))
    generator = _default_generator(device)
    before = generator.get_state()
    generator.manual_seed(zlib.crc32(f"{key}/{mesh.get_local_rank()}".encode()))
    try:
        yield
    finally:
        generator.set_state(before)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
