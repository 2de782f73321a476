"""Normalisation over the last dimension; statistics are always formed in float32 or better."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalerun.modules.init import Initializer, ones, zeros


class LayerNorm(nn.Module):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` (Ba et al. 2016, arXiv:1607.06450).

    torch's kernel keeps mean and variance in float32 for half-precision input.
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))

    def initializers(self) -> dict[str, Initializer]:
        return {"weight": ones, "bias": zeros}

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.dim,), self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * weight`` (Zhang and Sennrich 2019, arXiv:1910.07467).

    The division happens in float32, the product with the weight in the input's dtype.
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def initializers(self) -> dict[str, Initializer]:
        return {"weight": ones}

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return F.rms_norm(wide, (self.dim,), None, self.eps).to(x.dtype) * self.weight
