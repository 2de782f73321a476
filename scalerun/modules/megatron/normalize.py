"""Norms of features that are spread over the ranks of an axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scalerun.distributed.collectives import all_gather, all_reduce

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


def normalize_spread(x: Tensor, mesh: DeviceMesh, *, eps: float, center: bool) -> Tensor:
    """``(x - mean) / sqrt(var + eps)`` over the last dimension, which is spread over the axis.

    Mean and variance are those of all features, in float32 or better.

    Args:
        x: this rank's features.
        eps: added to the variance.
        center: False divides by the root mean square and subtracts nothing.

    Returns:
        float32, or float64 where x is.
    """
    result: Tensor = _NormalizeSpread.apply(x, mesh, eps, center)
    return result


class _NormalizeSpread(torch.autograd.Function):
    """With n the result and g its gradient, that of x is ``(g - mean(g) - n mean(g n)) / std``;
    without centering ``mean(g)`` is left out. Means are over all features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, eps: float, center: bool) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        if center:
            own = torch.stack((wide.mean(-1), wide.var(-1, correction=0)))
            means, variances = all_gather(own, mesh, 0).unflatten(0, (mesh.size(), 2)).unbind(1)
            # The ranks have equally many features.
            wide = wide - means.mean(0).unsqueeze(-1)
            variance = variances.mean(0) + means.var(0, correction=0)
        else:
            variance = all_reduce(wide.square().mean(-1), mesh) / mesh.size()
        rate = (variance + eps).rsqrt().unsqueeze(-1)
        normed = wide * rate
        ctx.save_for_backward(normed, rate)
        ctx.mesh, ctx.center, ctx.dtype = mesh, center, x.dtype
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        normed, rate = ctx.saved_tensors
        own = torch.stack((grad.mean(-1), (grad * normed).mean(-1)))
        mean, along = (all_reduce(own, ctx.mesh) / ctx.mesh.size()).unsqueeze(-1)
        grad = torch.addcmul(grad, normed, along, value=-1)
        if ctx.center:
            grad -= mean
        return grad.mul_(rate).to(ctx.dtype), None, None, None
