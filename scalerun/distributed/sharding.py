"""Parameters of which each rank of a mesh axis holds a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh
    from torch.distributed.tensor import DTensor


def empty_parameter(
    shape: Sequence[int], *, mesh: DeviceMesh | None = None, dim: int | tuple[int, int] = 0
) -> nn.Parameter:
    """An unset parameter. On a mesh it is a DTensor whose dimension ``dim`` is cut in equal parts.

    Args:
        shape: of the whole parameter.
        mesh: one axis; None for a plain parameter. Or two axes, and a dimension for each.

    Raises:
        ValueError: an axis does not divide its dimension.
    """
    if mesh is None:
        return nn.Parameter(torch.empty(*shape))
    from torch.distributed.tensor import DTensor, Shard  # slow to import, and not always needed

    local = list(shape)
    dims = (dim,) if isinstance(dim, int) else dim
    for size, cut in zip(mesh.shape, dims, strict=True):
        if local[cut] % size:
            raise ValueError(f"{size} ranks cannot share dimension {cut} of {tuple(shape)}")
        local[cut] //= size
    whole = torch.empty(*shape, device="meta")
    return nn.Parameter(
        DTensor.from_local(
            torch.empty(*local),
            mesh,
            [Shard(cut) for cut in dims],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    )


def part_of(parameter: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """This rank's part of what :func:`empty_parameter` made for the same mesh, with its gradient.

    The mesh says what the parameter is, which a compiler cannot find out for itself.
    """
    return parameter if mesh is None else cast("DTensor", parameter).to_local()


@torch.no_grad()
def fill(parameter: Tensor, whole: Tensor) -> None:
    """Set a parameter, or this rank's part of it, from its whole value.

    Args:
        whole: the same on every rank; nothing is sent.
    """
    if not hasattr(parameter, "device_mesh"):
        parameter.copy_(whole)
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    part = distribute_tensor(
        whole.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None
    )
    parameter.to_local().copy_(part.to_local())
