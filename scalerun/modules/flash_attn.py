"""The optional flash-attn package: the only file that imports it.

B batch, H heads, T queries, S keys, K width of a head.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch
from torch import Tensor


@cache
def _package() -> ModuleType | None:
    """flash-attn 2.1 or later (its causal mask is aligned to the last query), else None."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    package = importlib.import_module("flash_attn")
    major, minor = (int(part) for part in str(package.__version__).split(".")[:2])
    return package if (major, minor) >= (2, 1) else None


def usable(q_BHTK: Tensor) -> bool:
    """Whether the kernel can run: a half-precision CUDA tensor, and the package is installed."""
    return (
        q_BHTK.is_cuda
        and q_BHTK.dtype in (torch.float16, torch.bfloat16)
        and q_BHTK.shape[-1] <= 256
        and _package() is not None
    )


def flash_attention(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, *, causal: bool, dropout: float
) -> Tensor:
    """Softmax attention on flash-attn's kernel: (B, H, T, K).

    Raises:
        ImportError: the package is missing or too old.
    """
    package = _package()
    if package is None:
        raise ImportError("flash-attn 2.1 or later is not installed: pip install flash-attn")
    y_BTHK = package.flash_attn_func(
        q_BHTK.transpose(1, 2),
        k_BHSK.transpose(1, 2),
        v_BHSK.transpose(1, 2),
        dropout_p=dropout,
        causal=causal,
    )
    return y_BTHK.transpose(1, 2)
