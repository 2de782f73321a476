"""Exchanges between the ranks of one mesh axis, and their gradients, over gloo or NCCL.

Every rank of the axis has to call them, in one order, forward and backward. The plain functions
return new tensors and know no gradient; :func:`exchange` joins two of them to an operation that
does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

Exchange = Callable[[Tensor, "DeviceMesh", int], Tensor]
"""A tensor, an axis, and the dimension that is cut or joined."""

# Torch 2.13 has new names, and torch 2.11 has the old ones alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def alone(mesh: DeviceMesh | None) -> bool:
    """Whether there is nobody to exchange with."""
    return mesh is None or mesh.size() == 1


def all_reduce(x: Tensor, mesh: DeviceMesh, dim: int = 0, *, largest: bool = False) -> Tensor:
    """The sum over the ranks, or the largest, element by element; ``dim`` is not used."""
    total = x.contiguous().clone()
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    dist.all_reduce(total, op=op, group=mesh.get_group())
    return total


def all_gather(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """The ranks' tensors, which have one shape, joined along ``dim``."""
    ranks = mesh.size()
    parts = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    _all_gather(parts, x.contiguous(), group=mesh.get_group())
    return parts if dim % x.ndim == 0 else torch.cat(parts.chunk(ranks), dim)


def reduce_scatter(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """This rank's part, along ``dim``, of the sum over the ranks."""
    parts = _parts(x, mesh, dim)
    total = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    joined = torch.cat(parts) if dim % x.ndim else x.contiguous()
    _reduce_scatter(total, joined, group=mesh.get_group())
    return total


def own_part(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """This rank's part along ``dim``, as a copy: the rest can be freed. Nothing is sent."""
    part = _parts(x, mesh, dim)[mesh.get_local_rank()]
    return part.clone(memory_format=torch.contiguous_format)


def itself(x: Tensor, mesh: DeviceMesh, dim: int = 0) -> Tensor:
    """The tensor as it is; nothing is sent."""
    return x.view_as(x)


def exchange(x: Tensor, mesh: DeviceMesh, dim: int, *, there: Exchange, back: Exchange) -> Tensor:
    """``there(x)``, whose gradient is ``back`` of the gradient."""
    result: Tensor = _Exchange.apply(x, mesh, dim, there, back)
    return result


class _Exchange(torch.autograd.Function):
    """One function of this file forward, another one backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mesh: DeviceMesh, dim: int, there: Exchange, back: Exchange
    ) -> Tensor:
        ctx.mesh, ctx.dim, ctx.back = mesh, dim, back
        return there(x, mesh, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(grad, ctx.mesh, ctx.dim), None, None, None, None


def _parts(x: Tensor, mesh: DeviceMesh, dim: int) -> tuple[Tensor, ...]:
    ranks = mesh.size()
    if x.shape[dim] % ranks:
        raise ValueError(f"{ranks} ranks cannot share dimension {dim} of {tuple(x.shape)}")
    return x.chunk(ranks, dim)


def all_to_all(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Part i of ``x`` goes to rank i: the parts of all ranks that are for this one, in order.

    Args:
        x: (ranks, ...); no gradient.
    """
    arrived = torch.empty_like(x)
    dist.all_to_all_single(arrived, x.contiguous(), group=mesh.get_group())
    return arrived


def all_to_all_rows(
    rows: Tensor, mesh: DeviceMesh, *, sent: Sequence[int], received: Sequence[int]
) -> Tensor:
    """The next ``sent[i]`` rows go to rank i, and ``received[i]`` come from it, in order.

    Backward the gradients take the way back.

    Args:
        rows: (sum of ``sent``, D).
        sent: rows for each rank; 0 for none.
        received: rows from each rank, which it has to know as well.

    Returns:
        (sum of ``received``, D).
    """
    arrived: Tensor = _AllToAllRows.apply(rows, mesh, list(sent), list(received))
    return arrived


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, mesh: DeviceMesh, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.mesh, ctx.sent, ctx.received = mesh, sent, received
        return _send_rows(rows, mesh, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _send_rows(grad, ctx.mesh, ctx.received, ctx.sent), None, None, None


def _send_rows(rows: Tensor, mesh: DeviceMesh, sent: list[int], received: list[int]) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=mesh.get_group())
    return arrived
