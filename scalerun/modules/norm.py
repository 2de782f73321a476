"""Normalisation over the last dimension; statistics are always formed in float32 or better."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from scalerun.distributed.sharding import empty_parameter, part_of
from scalerun.modules.block_context import BlockContext
from scalerun.modules.init import Initializer, ones, zeros
from scalerun.modules.megatron.mappings import copy_to, gather_from, scatter_to
from scalerun.modules.megatron.normalize import normalize_spread
from scalerun.modules.multiway import route

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


class LayerNorm(nn.Module):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016, arXiv:1607.06450).

    torch's kernel keeps mean and variance in float32 for half-precision input.
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.tp_mesh: DeviceMesh | None = None
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))

    def spread_over(self, tp_mesh: DeviceMesh) -> None:
        """Let each rank of an axis norm its part of the features, by all features' statistics."""
        self.tp_mesh = tp_mesh
        self.weight = empty_parameter((self.dim,), mesh=tp_mesh)
        self.bias = empty_parameter((self.dim,), mesh=tp_mesh)

    def initializers(self) -> dict[str, Initializer]:
        return {"weight": ones, "bias": zeros}

    def forward(self, x: Tensor) -> Tensor:
        if self.tp_mesh is None:
            weight: Tensor = self.weight
            bias: Tensor = self.bias
            if weight.dtype != x.dtype:
                # Sharding may gather them in a half type, which the kernel does not mix with
                # float32.
                dtype = torch.promote_types(weight.dtype, x.dtype)
                weight, bias = weight.to(dtype), bias.to(dtype)
            return F.layer_norm(x, (self.dim,), weight, bias, self.eps)
        normed = normalize_spread(x, self.tp_mesh, eps=self.eps, center=True)
        weight, bias = (part_of(p, self.tp_mesh) for p in (self.weight, self.bias))
        y = torch.addcmul(bias, normed, weight)
        return y.to(torch.promote_types(x.dtype, self.weight.dtype))


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * weight`` (Zhang and Sennrich 2019, arXiv:1910.07467).

    The division happens in float32, the product with the weight in the input's dtype.
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.tp_mesh: DeviceMesh | None = None
        self.weight = nn.Parameter(torch.empty(dim))

    def spread_over(self, tp_mesh: DeviceMesh) -> None:
        """Let each rank of an axis norm its part of the features, by all features' statistics."""
        self.tp_mesh = tp_mesh
        self.weight = empty_parameter((self.dim,), mesh=tp_mesh)

    def initializers(self) -> dict[str, Initializer]:
        return {"weight": ones}

    def forward(self, x: Tensor) -> Tensor:
        if self.tp_mesh is not None:
            normed = normalize_spread(x, self.tp_mesh, eps=self.eps, center=False)
            return normed.to(x.dtype) * part_of(self.weight, self.tp_mesh)
        wide = x if x.dtype == torch.float64 else x.float()
        return F.rms_norm(wide, (self.dim,), None, self.eps).to(x.dtype) * self.weight


def normed(norm: nn.Module, x_BTD: Tensor, context: BlockContext) -> Tensor:
    """The norm of the residual stream, by halves if it is multiway.

    Where the tokens are spread, the ranks' gradients of the norm's parameters are added up, in one
    exchange.
    """
    mesh = context.time_mesh
    parameters = {} if mesh is None else dict(norm.named_parameters())
    if not parameters:
        return route(norm, x_BTD, context)
    joined = copy_to(torch.cat([parameter.flatten() for parameter in parameters.values()]), mesh)
    parts = joined.split([parameter.numel() for parameter in parameters.values()])
    shared = {
        name: part.view_as(parameters[name]) for name, part in zip(parameters, parts, strict=True)
    }
    return functional_call(norm, shared, (x_BTD,))


def normed_inside(
    norm: nn.Module, x_BTF: Tensor, tp_mesh: DeviceMesh | None, context: BlockContext
) -> Tensor:
    """The norm inside a branch, of features that an axis shares; or of all, if there is none.

    A norm that does not know of the axis gets all features.
    """
    if tp_mesh is None or getattr(norm, "tp_mesh", None) is not None:
        return route(norm, x_BTF, context)
    return scatter_to(route(norm, gather_from(x_BTF, tp_mesh), context), tp_mesh)
