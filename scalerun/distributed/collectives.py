"""Exchanges between the ranks of one mesh axis, and their gradients, over gloo or NCCL.

Every rank of the axis has to call them, in one order, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


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
