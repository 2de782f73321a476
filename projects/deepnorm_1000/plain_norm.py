"""The plain decoder with norms that have neither gains nor biases.

Each of 2,000 norms passes its gain and bias on to all later ones, so that their changes add up over
the depth. DeepNorm (Wang et al. 2022, arXiv:2203.00555) keeps the changes of projections in bounds,
not these; without them a run shows what the residuals do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalerun.models.base_model import register_model
from scalerun.models.blocks import TransformerParts
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_lm import TransformerLM

# The gradients of the plain residuals fade below 1e-38, where processors compute many times slower.
torch.set_flush_denormal(True)


@dataclass
class PlainNormConfig(TransformerConfig):
    """The settings of a transformer decoder."""


class PlainNorm(nn.Module):
    """``(x - mean) / sqrt(var + eps)``."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.dim,), eps=self.eps)


class PlainNormParts(TransformerParts):
    """All parts of the plain decoder but one."""

    def one_norm(self, dim: int) -> nn.Module:
        return PlainNorm(dim, self.cfg.layernorm_eps)


@register_model("plain_norm_lm", PlainNormConfig)
class PlainNormLM(TransformerLM):
    """``--arch plain_norm_lm``, with the defaults of :class:`PlainNormConfig`."""

    parts_class = PlainNormParts
