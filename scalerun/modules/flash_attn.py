"""The optional flash-attn package: the only file that imports it.

B batch, H heads, T queries, S keys, K width of a head.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

try:
    import flash_attn as _flash_attn
except ImportError:
    _flash_attn = None

package: ModuleType | None = _flash_attn
"""flash-attn, when it is installed and can be imported."""

LARGEST_HEAD = 256
OLDEST_VERSION = (2, 1)
"""Since this version the causal mask is aligned to the last query, as cached keys need it."""


def version(module: ModuleType) -> tuple[int, ...]:
    """Major and minor version of a package."""
    return tuple(int(part) for part in str(module.__version__).split(".")[:2])


def usable(q_BHTK: Tensor) -> bool:
    """Whether the kernel can run: half-precision CUDA tensors, and a package that is new enough."""
    return (
        q_BHTK.is_cuda
        and package is not None
        and q_BHTK.dtype in (torch.float16, torch.bfloat16)
        and q_BHTK.shape[-1] <= LARGEST_HEAD
        and version(package) >= OLDEST_VERSION
    )


def flash_attention(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, *, causal: bool, dropout: float
) -> Tensor:
    """Softmax attention with scale ``K**-0.5`` on flash-attn's kernel: (B, H, T, K).

    Raises:
        ImportError: the package is missing.
    """
    if package is None:
        raise ImportError("flash-attn is not installed; pip install flash-attn")
    y_BTHK: Tensor = package.flash_attn_func(
        q_BHTK.transpose(1, 2),
        k_BHSK.transpose(1, 2),
        v_BHSK.transpose(1, 2),
        dropout_p=dropout,
        causal=causal,
    )
    return y_BTHK.transpose(1, 2)
