from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scalerun.modules import flash_attn


def kernel(q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, causal: bool) -> Tensor:
    """What the package documents: time before heads, causal mask aligned to the last query."""
    assert dropout_p == 0.0
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    queries, keys = q.shape[2], k.shape[2]
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) if causal else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


def test_layouts_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn, "package", SimpleNamespace(flash_attn_func=kernel))
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    result = flash_attn.flash_attention(q, k, v, causal=True, dropout=0.0)
    torch.testing.assert_close(result, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn, "package", None)
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ImportError, match="pip install flash-attn"):
        flash_attn.flash_attention(q, q, q, causal=True, dropout=0.0)


class CudaTensor(SimpleNamespace):
    is_cuda = True
    dtype = torch.bfloat16
    shape = (1, 2, 3, 64)


@pytest.mark.parametrize(
    ("change", "installed", "expected"),
    [
        ({}, "2.6.3", True),
        ({}, None, False),
        ({}, "2.0.9", False),
        ({"is_cuda": False}, "2.6.3", False),
        ({"dtype": torch.float32}, "2.6.3", False),
        ({"shape": (1, 2, 3, 512)}, "2.6.3", False),
    ],
)
def test_the_kernel_is_used_only_where_it_can_run(
    change: dict[str, Any], installed: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = SimpleNamespace(__version__=installed) if installed else None
    monkeypatch.setattr(flash_attn, "package", package)
    tensor: Any = CudaTensor(**change)
    assert flash_attn.usable(tensor) is expected
