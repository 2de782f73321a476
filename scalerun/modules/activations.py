"""The non-linear functions of feed-forward layers, by the names that flags give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]
"""Elementwise. torch's kernels compute half-precision input in float32 and round the result."""

FEW_NUMBERS = 16_384
"""So many a CPU is through with before oneDNN, torch's default for GELU, has set out."""


def gelu(x: Tensor) -> Tensor:
    """``x * Phi(x)``, Phi the normal distribution (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    onednn: Any = torch.backends.mkldnn
    few = x.device.type == "cpu" and x.numel() <= FEW_NUMBERS and not torch.is_grad_enabled()
    if not few or torch.compiler.is_compiling() or not onednn.enabled:
        return F.gelu(x)
    # Switched on again whatever another thread has made of it, for it was on: two threads that each
    # put back what they found could leave it off.
    onednn.enabled = False
    try:
        return F.gelu(x)
    finally:
        onednn.enabled = True


def gelu_tanh(x: Tensor) -> Tensor:
    """``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x**3)))``, close to gelu."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "swish": F.silu,
}
