"""Where tensors go between whole and spread, forward and backward.

Sources: Shoeybi et al. 2019, arXiv:1909.08053 (tensor parallelism); Korthikanti et al. 2022,
arXiv:2205.05198 (tokens spread as well, "sequence parallel").

A tensor is *whole* where all ranks of the axis have the same, *spread* where each has an equal part
of one dimension, and *partial* where their sum is meant. The gradient of a whole tensor is whole
too, unless a function says that it is partial. All are the identity on no axis or a single rank,
and all ranks have to call them.

B batch, T tokens, D model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from scalerun.distributed.collectives import (
    all_gather,
    all_reduce,
    alone,
    exchange,
    itself,
    own_part,
    reduce_scatter,
)

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

TIME = 1
"""The dimension of tokens in (B, T, D)."""


def copy_to(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """A whole tensor that the ranks use in different ways: their partial gradients are added."""
    if mesh is None or alone(mesh):
        return x
    return exchange(x, mesh, 0, there=itself, back=all_reduce)


def reduce_from(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The whole sum of partial tensors."""
    if mesh is None or alone(mesh):
        return x
    return exchange(x, mesh, 0, there=all_reduce, back=itself)


def scatter_to(x: Tensor, mesh: DeviceMesh | None, dim: int = -1) -> Tensor:
    """This rank's part of a whole tensor, by default of its last dimension.

    Raises:
        ValueError: the axis does not divide the dimension.
    """
    if mesh is None or alone(mesh):
        return x
    return exchange(x, mesh, dim, there=own_part, back=all_gather)


def gather_from(x: Tensor, mesh: DeviceMesh | None, dim: int = -1) -> Tensor:
    """The whole of a spread tensor, by default of its last dimension."""
    if mesh is None or alone(mesh):
        return x
    return exchange(x, mesh, dim, there=all_gather, back=own_part)


def scatter_to_sequence(x_BTD: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """This rank's tokens of a whole tensor."""
    return scatter_to(x_BTD, mesh, TIME)


def gather_from_sequence(
    x_BTD: Tensor, mesh: DeviceMesh | None, *, partial_gradient: bool = True
) -> Tensor:
    """All tokens of a spread tensor.

    Args:
        partial_gradient: the ranks use them in different ways, as column-parallel layers do, so
            that their gradients have to be added; False where all ranks do the same.
    """
    if mesh is None or alone(mesh):
        return x_BTD
    back = reduce_scatter if partial_gradient else own_part
    return exchange(x_BTD, mesh, TIME, there=all_gather, back=back)


def reduce_scatter_to_sequence(x_BTD: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """This rank's tokens of the sum of partial tensors."""
    if mesh is None or alone(mesh):
        return x_BTD
    return exchange(x_BTD, mesh, TIME, there=reduce_scatter, back=all_gather)


def enter(x_BTD: Tensor, tp_mesh: DeviceMesh | None, time_mesh: DeviceMesh | None) -> Tensor:
    """What column-parallel products read: all tokens.

    Args:
        x_BTD: all tokens on each rank, or its own ones.
        tp_mesh: axis that shares the products.
        time_mesh: axis that the tokens are spread over: the same one, or None.
    """
    return copy_to(x_BTD, tp_mesh) if time_mesh is None else gather_from_sequence(x_BTD, time_mesh)


def leave(y_BTD: Tensor, tp_mesh: DeviceMesh | None, time_mesh: DeviceMesh | None) -> Tensor:
    """The sum of what row-parallel products gave, for all tokens or for this rank's."""
    if time_mesh is None:
        return reduce_from(y_BTD, tp_mesh)
    return reduce_scatter_to_sequence(y_BTD, time_mesh)
