from __future__ import annotations

import math

import pytest
import torch

from scalerun.modules.attention_lse import (
    CudaEfficient,
    CudaFlash,
    Kernel,
    Options,
    PlainSoftmax,
    kernel_for,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def bias(keys: int) -> torch.Tensor:
    """Hides the last three keys of the first row."""
    added = torch.zeros(2, 3, 1, keys, device="cuda")
    added[0, ..., keys - 3 :] = -math.inf
    return added


@pytest.mark.parametrize(
    ("dtype", "kind", "tolerance"),
    [(torch.bfloat16, CudaFlash, 0.05), (torch.float32, CudaEfficient, 2e-3)],
)
@pytest.mark.parametrize("case", ["full", "causal"])
def test_fast_kernels_agree_with_plain_softmax(
    dtype: torch.dtype, kind: type[Kernel], tolerance: float, case: str
) -> None:
    q, k, v, grad = (torch.randn(2, 3, 80, 64, device="cuda", dtype=dtype) for _ in range(4))
    compare(q, k, v, grad, Options(causal=case == "causal"), kind, tolerance)


def test_the_efficient_kernel_adds_a_bias() -> None:
    q, k, v, grad = (torch.randn(2, 3, 80, 64, device="cuda") for _ in range(4))
    compare(q, k, v, grad, Options(bias(80)), CudaEfficient, 2e-3)


def compare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    options: Options,
    kind: type[Kernel],
    tolerance: float,
) -> None:
    kernel, plain = kernel_for(q, k, v, options), PlainSoftmax()
    assert isinstance(kernel, kind)
    fast, slow = (each.forward(q, k, v, options) for each in (kernel, plain))
    torch.testing.assert_close(fast.out_BHTK, slow.out_BHTK, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(fast.lse_BHT, slow.lse_BHT, atol=tolerance, rtol=tolerance)
    grads = (each.backward(grad, q, k, v, fast, options) for each in (kernel, plain))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
