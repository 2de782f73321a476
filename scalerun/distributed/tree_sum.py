"""Adds gradients along one fixed binary tree, whatever the number of data-parallel ranks.

Floating-point addition is commutative but not associative: a sum's bits depend on which terms meet
first. Here batch 0 of an update meets batch 1, 2 meets 3, then the pairs meet, and so on. Rank r of
R reads the batches r, R + r, ... of an update, so ranks are the lowest levels of that tree, for
every R that is a power of 2, and what a rank has itself the upper ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scalerun.distributed.gradient_sum import GradientSum
from scalerun.distributed.mesh import local_part

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TreeSum(GradientSum):
    """Sums over ranks after each batch, then over batches in pairs of pairs.

    Slower than the other ways: nothing is hidden behind computation, every batch is sent, and
    gradients of up to ``log2(update_freq) + 1`` levels are held.

    Args:
        params: whose gradients are summed.
        over_ranks: makes the gradients of a batch sums over the ranks.
    """

    def __init__(self, params: Sequence[nn.Parameter], over_ranks: Callable[[], None]) -> None:
        self._params = [param for param in params if param.requires_grad]
        self._over_ranks = over_ranks
        self._levels: list[tuple[int, list[Tensor | None]]] = []
        """Sums of so many batches, the largest first."""

    @contextlib.contextmanager
    def batch(self, *, last: bool) -> Iterator[None]:
        yield
        self._over_ranks()
        count, grads = 1, [param.grad for param in self._params]
        for param in self._params:
            param.grad = None
        while self._levels and self._levels[-1][0] == count:
            count, grads = 2 * count, _add(self._levels.pop()[1], grads)
        self._levels.append((count, grads))

    def finish(self) -> None:
        _, grads = self._levels.pop()
        while self._levels:
            grads = _add(self._levels.pop()[1], grads)
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = grad


def all_reduce_tree(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over a group of 2**n ranks, in place, along the tree; equal bits on every rank."""
    rank, distance = group.rank(), 1
    while distance < group.size():
        tensor += _exchange(tensor, rank ^ distance, group)
        distance *= 2
    return tensor


class TreeReduceScatter:
    """What FSDP calls to sum whole gradients and keep this rank's part.

    In the step of distance d two partners keep those chunks whose number agrees with their own rank
    in that bit, so that each holds one chunk in the end.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer that FSDP fills."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum ``input_tensor`` over the ranks; rank r gets chunk r of it."""
        rank, distance = group.rank(), 1
        chunks = dict(enumerate(input_tensor.view(group.size(), -1)))
        while distance < group.size():
            kept = [n for n in chunks if n & distance == rank & distance]
            sent = torch.stack([part for n, part in chunks.items() if n not in kept])
            received = _exchange(sent, rank ^ distance, group)
            chunks = {n: chunks[n] + part for n, part in zip(kept, received, strict=True)}
            distance *= 2
        output_tensor.copy_(chunks[rank].view_as(output_tensor))


def sum_replicated(params: Sequence[nn.Parameter], group: ProcessGroup) -> Callable[[], None]:
    """Makes gradients of whole copies sums over ``group``."""
    trained = [param for param in params if param.requires_grad]

    def over_ranks() -> None:
        for param in trained:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            all_reduce_tree(local_part(param.grad), group)

    return over_ranks


def _add(first: list[Tensor | None], second: list[Tensor | None]) -> list[Tensor | None]:
    found = []
    for a, b in zip(first, second, strict=True):
        found.append(a if b is None else b if a is None else a + b)
    return found


def _exchange(tensor: Tensor, partner: int, group: ProcessGroup) -> Tensor:
    """Send a tensor to a rank of the group, and receive its one of the same shape."""
    received = torch.empty_like(tensor)
    dist = torch.distributed
    operations = [
        dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=partner),
        dist.P2POp(dist.irecv, received, group=group, group_peer=partner),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received
