from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from scalerun.modules.attention_lse import (
    CpuFlash,
    Options,
    PlainSoftmax,
    attention_lse,
    attention_lse_backward,
    kernel_for,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 4e-2}
every_type = pytest.mark.parametrize("dtype", TOLERANCE)


def inputs(dtype: torch.dtype, *, keys: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and the gradient of the output."""
    generator = torch.Generator().manual_seed(2)
    lengths = (9, keys, keys, 9)
    q, k, v, grad = (torch.randn(2, 3, n, 8, generator=generator).to(dtype) for n in lengths)
    return q, k, v, grad


def some_bias() -> Tensor:
    """Hides the last two keys of the first row, from all heads and queries."""
    bias = torch.zeros(2, 1, 1, 9)
    bias[0, ..., 7:] = -math.inf
    return bias


def formula(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64, by autograd."""
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    if options.bias_BHTS is not None:
        scores = scores + options.bias_BHTS
    if options.causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


CASES = {"full": Options(), "causal": Options(causal=True), "bias": Options(some_bias())}


@every_type
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", [CpuFlash(), PlainSoftmax()])
def test_every_kernel_follows_the_formula(
    kernel: CpuFlash | PlainSoftmax, case: str, dtype: torch.dtype
) -> None:
    q, k, v, grad = inputs(dtype)
    attended = kernel.forward(q, k, v, CASES[case])
    grads = kernel.backward(grad, q, k, v, attended, CASES[case])
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = formula(exact[0], exact[1], exact[2], CASES[case])
    expected = torch.autograd.grad(out, exact, grad.double())
    assert attended.lse_BHT.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for actual, right in zip(
        (attended.out_BHTK, attended.lse_BHT, *grads), (out, lse, *expected), strict=True
    ):
        torch.testing.assert_close(actual.double(), right, atol=TOLERANCE[dtype], rtol=0)
    assert attended.out_BHTK.dtype == grads[0].dtype == dtype


def test_the_backward_of_a_part_is_the_part_of_the_backward() -> None:
    q, k, v, grad = inputs(torch.float64, keys=14)
    whole = attention_lse(q, k, v)
    q_grad, k_grad, v_grad = attention_lse_backward(grad, q, k, v, whole)
    parts = [
        attention_lse_backward(grad, q, k[:, :, cut], v[:, :, cut], whole)
        for cut in (slice(0, 5), slice(5, 14))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], q_grad)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], 2), k_grad)
    torch.testing.assert_close(torch.cat([part[2] for part in parts], 2), v_grad)


def test_dropout_drops_the_same_weights_in_the_backward() -> None:
    q, k, v, grad = inputs(torch.float64)
    options = Options(causal=True, dropout=0.4)
    attended = attention_lse(q, k, v, options)
    grads = attention_lse_backward(grad, q, k, v, attended, options)
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].mT / math.sqrt(8)
    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
    out = scores.softmax(-1) * attended.drawn[0] / 0.6 @ exact[2]
    torch.testing.assert_close(attended.out_BHTK, out)
    torch.testing.assert_close(grads, torch.autograd.grad(out, exact, grad))


def test_dropout_keeps_the_mean() -> None:
    q, k, _, _ = inputs(torch.float32)
    v = torch.ones(200, 3, 9, 8)
    q, k = (x[:1].expand(200, -1, -1, -1) for x in (q, k))
    attended = attention_lse(q, k, v, Options(dropout=0.3))
    assert attended.out_BHTK.std() > 0.1
    assert attended.out_BHTK.mean().item() == pytest.approx(1.0, abs=0.02)
    torch.testing.assert_close(attended.lse_BHT, attention_lse(q, k, v).lse_BHT)


def test_plain_softmax_is_only_for_what_the_fast_kernel_cannot() -> None:
    q, k, v, _ = inputs(torch.float32)
    assert isinstance(kernel_for(q, k, v, Options(some_bias())), CpuFlash)
    assert isinstance(kernel_for(q, k, v, Options(dropout=0.1)), PlainSoftmax)
    elsewhere = (x.to("meta") for x in (q, k, v))
    assert isinstance(kernel_for(*elsewhere, Options()), PlainSoftmax)


def test_autocast_leaves_the_softmax_precise() -> None:
    q, k, v, grad = inputs(torch.float32)
    options = Options(dropout=0.5)
    torch.manual_seed(1)
    expected = attention_lse(q, k, v, options)
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attended = attention_lse(q, k, v, options)
        grads = attention_lse_backward(grad, q, k, v, attended, options)
    torch.testing.assert_close(attended.out_BHTK, expected.out_BHTK)
    torch.testing.assert_close(grads, attention_lse_backward(grad, q, k, v, expected, options))
