"""Adds up the gradients of ranks that see other tokens."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scalerun.distributed.mesh import local_part

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BUCKET_BYTES = 25 * 2**20
"""Gradients that are sent as one tensor; torch's own default."""


class GradientSum(ABC):
    """When and how gradients meet.

    Each batch's forward and backward pass of an update happens in :meth:`batch`; after the last one
    come :meth:`finish` and then the optimizer.
    """

    @abstractmethod
    def batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of one batch; ``last`` is that of the update."""

    @abstractmethod
    def finish(self) -> None:
        """Return when every gradient is the sum over all ranks and batches."""


class LocalSum(GradientSum):
    """One data-parallel rank: autograd adds the batches up."""

    @contextlib.contextmanager
    def batch(self, *, last: bool) -> Iterator[None]:
        yield

    def finish(self) -> None:
        pass


class ReplicatedSum(GradientSum):
    """Every rank has whole copies: gradients travel in buckets, while backward still computes.

    torch's own wrapper averages, and takes no parameters that are spread over another axis.
    Parameters without a gradient count as 0, as they may have one on another rank.

    Args:
        groups: parameters, and the ranks that have copies of them.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[nn.Parameter], ProcessGroup]]) -> None:
        self._buckets = [
            _Bucket(params, group)
            for all_params, group in groups
            for params in _cut([param for param in all_params if param.requires_grad])
        ]
        self._last = False
        for bucket in self._buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(self._hook(bucket))

    @contextlib.contextmanager
    def batch(self, *, last: bool) -> Iterator[None]:
        self._last = last
        yield

    def finish(self) -> None:
        for bucket in self._buckets:
            bucket.send()
        for bucket in self._buckets:
            bucket.receive()

    def _hook(self, bucket: _Bucket) -> Any:
        def ready(param: Tensor) -> None:
            if self._last:
                bucket.ready += 1
                # In the order of the buckets, which is the same on every rank.
                for each in self._buckets:
                    if each.ready < len(each.params):
                        break
                    each.send()

        return ready


class _Bucket:
    """Parameters whose gradients are sent as one tensor."""

    def __init__(self, params: list[nn.Parameter], group: ProcessGroup) -> None:
        self.params = params
        self.group = group
        self.ready = 0
        self._work: Any = None
        self._flat: Tensor | None = None

    def send(self) -> None:
        """Start the reduction, unless it was started."""
        if self._work is not None:
            return
        parts = []
        for param in self.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            parts.append(local_part(param.grad).reshape(-1))
        self._flat = torch.cat(parts)
        self._work = torch.distributed.all_reduce(self._flat, group=self.group, async_op=True)

    def receive(self) -> None:
        """Wait for the sum and put it into the gradients."""
        assert self._flat is not None
        self._work.wait()
        sizes = [local_part(param).numel() for param in self.params]
        for param, part in zip(self.params, self._flat.split(sizes), strict=True):
            assert param.grad is not None
            local = local_part(param.grad)
            local.copy_(part.view_as(local))
        self.ready, self._work, self._flat = 0, None, None


def _cut(params: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbouring parameters of one type, from the last backwards as their gradients come."""
    bucket: list[nn.Parameter] = []
    size = 0
    for param in reversed(params):
        bytes_here = local_part(param).numel() * param.element_size()
        if bucket and (size + bytes_here > BUCKET_BYTES or param.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(param)
        size += bytes_here
    if bucket:
        yield bucket
