"""Normalisation over the last dimension; statistics are always formed in float32 or better."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalerun.distributed.sharding import empty_parameter, part_of
from scalerun.modules.block_context import BlockContext
from scalerun.modules.init import Initializer, ones, zeros
from scalerun.modules.megatron.mappings import copy_to
from scalerun.modules.megatron.normalize import normalize_spread
from scalerun.modules.multiway import route

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


class LayerNorm(nn.Module):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016, arXiv:1607.06450).

    torch's kernel keeps mean and variance in float32 for half-precision input.

    Args:
        dim: number of features.
        eps: added to the variance.
        tp_mesh: axis that the features are spread over; None if each rank has all of them.
    """

    def __init__(self, dim: int, eps: float = 1e-5, tp_mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.tp_mesh = tp_mesh
        self.weight = empty_parameter((dim,), mesh=tp_mesh)
        self.bias = empty_parameter((dim,), mesh=tp_mesh)

    def initializers(self) -> dict[str, Initializer]:
        return {"weight": ones, "bias": zeros}

    def forward(self, x: Tensor, time_mesh: DeviceMesh | None = None) -> Tensor:
        """The norm of each token's features.

        Args:
            time_mesh: axis that the tokens are spread over: the gradients of weight and bias are
                added up over its ranks.
        """
        if self.tp_mesh is not None:
            normed = normalize_spread(x, self.tp_mesh, eps=self.eps, center=True)
            weight, bias = (part_of(p, self.tp_mesh) for p in (self.weight, self.bias))
            y = torch.addcmul(bias, normed, weight)
            return y.to(torch.promote_types(x.dtype, self.weight.dtype))
        if time_mesh is None:
            return F.layer_norm(x, (self.dim,), self.weight, self.bias, self.eps)
        # One exchange for both gradients.
        weight, bias = copy_to(torch.stack((self.weight, self.bias)), time_mesh).unbind()
        return F.layer_norm(x, (self.dim,), weight, bias, self.eps)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * weight`` (Zhang and Sennrich 2019, arXiv:1910.07467).

    The division happens in float32, the product with the weight in the input's dtype. Arguments as
    in :class:`LayerNorm`.
    """

    def __init__(self, dim: int, eps: float = 1e-5, tp_mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.tp_mesh = tp_mesh
        self.weight = empty_parameter((dim,), mesh=tp_mesh)

    def initializers(self) -> dict[str, Initializer]:
        return {"weight": ones}

    def forward(self, x: Tensor, time_mesh: DeviceMesh | None = None) -> Tensor:
        """As in :class:`LayerNorm`."""
        if self.tp_mesh is not None:
            normed = normalize_spread(x, self.tp_mesh, eps=self.eps, center=False)
            return normed.to(x.dtype) * part_of(self.weight, self.tp_mesh)
        wide = x if x.dtype == torch.float64 else x.float()
        normed = F.rms_norm(wide, (self.dim,), None, self.eps).to(x.dtype)
        return normed * copy_to(self.weight, time_mesh)


def normed(norm: nn.Module, x_BTD: Tensor, context: BlockContext) -> Tensor:
    """The norm of the residual stream, by halves if it is multiway."""
    if context.time_mesh is None:
        return route(norm, x_BTD, context)
    return norm(x_BTD, context.time_mesh)
