"""Collectives that gradients pass through. The group is always an argument.

All ranks of the group call them, in the same order, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each rank's row goes to that rank: what the ranks have for this one, in their order.

    Args:
        counts: (ranks, ...), integers.
    """
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def exchange_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Pieces of rows go to the ranks and theirs come here, in the order of ranks.

    Backward the gradients take the way back.

    Args:
        rows: (sum of ``sent``, D).
        sent: rows for each rank; 0 for none.
        received: rows of each rank.

    Returns:
        (sum of ``received``, D).
    """
    arrived: Tensor = _ExchangeRows.apply(rows, list(sent), list(received), group)
    return arrived


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange_rows(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange_rows(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange_rows(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
