from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from scalerun.modules.attention import attend
from scalerun.modules.dilation import Dilation
from scalerun.modules.merged_attention import MERGE_GRADIENTS, merge

BRANCHES = Dilation((4, 6), (2, 3))
every_gradient = pytest.mark.parametrize("merge_gradient", MERGE_GRADIENTS)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, 7, 3, 4).to(dtype).requires_grad_() for _ in range(3))
    return q, k, v


def by_autograd(q: Tensor, k: Tensor, v: Tensor, *, constant_shares: bool) -> Tensor:
    """Causal ``BRANCHES`` on (B, T, H, K), with all scores at once."""
    scores = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
    outs, lses = [], []
    t, h = torch.arange(7), torch.arange(3)
    for length, ratio in BRANCHES.branches():
        kept = t % ratio == (h // math.ceil(3 / ratio))[:, None]
        seen = kept[:, :, None] & kept[:, None] & (t[:, None] // length == t // length)
        hidden = scores.masked_fill(~(seen & (t[:, None] >= t)), -math.inf)
        lse = hidden.logsumexp(-1)
        weights = (hidden - lse.masked_fill(~kept, 0.0).unsqueeze(-1)).exp()
        outs.append(torch.einsum("bhts,bshk->bthk", weights, v))
        lses.append(lse.transpose(1, 2))
    lse = torch.stack(lses)
    shares = (lse - lse.logsumexp(0).nan_to_num(neginf=0.0)).exp()
    if constant_shares:
        shares = shares.detach()
    return (torch.stack(outs) * shares.unsqueeze(-1)).sum(0)


@every_gradient
def test_values_and_gradients_are_those_of_autograd(merge_gradient: str) -> None:
    q, k, v = inputs()
    merged = merge(q, k, v, BRANCHES.segments(q, causal=True), merge_gradient=merge_gradient)
    expected = by_autograd(q, k, v, constant_shares=merge_gradient == "torchscale")
    torch.testing.assert_close(merged, expected)
    grad = torch.randn_like(merged)
    torch.testing.assert_close(
        torch.autograd.grad(merged, (q, k, v), grad),
        torch.autograd.grad(expected, (q, k, v), grad),
    )


def test_the_two_gradients_differ_where_branches_share_a_query() -> None:
    q, k, v = inputs()
    exact, constant = (by_autograd(q, k, v, constant_shares=fixed) for fixed in (False, True))
    grad = torch.randn_like(exact)
    one, other = (torch.autograd.grad(out, q, grad)[0] for out in (exact, constant))
    assert (one - other).abs().max() > 1e-3


def test_the_exact_gradient_passes_the_numeric_check() -> None:
    q, k, v = inputs()
    segments = BRANCHES.segments(q, causal=True)
    assert torch.autograd.gradcheck(
        lambda *x: merge(*x, segments, merge_gradient="exact"), (q, k, v)
    )


def test_the_exact_gradient_passes_the_numeric_check_with_padding() -> None:
    q, k, v = inputs()
    segments = BRANCHES.segments(q, causal=False, lengths_B=torch.tensor([7, 4]))
    real = torch.arange(7) < torch.tensor([[7], [4]])

    def masked(*x: Tensor) -> Tensor:
        return merge(*x, segments, merge_gradient="exact") * real[..., None, None]

    assert torch.autograd.gradcheck(masked, (q, k, v))


@every_gradient
def test_one_branch_over_everything_is_attention(merge_gradient: str) -> None:
    q, k, v = inputs()
    segments = Dilation((8,), (1,)).segments(q, causal=True)
    merged = merge(q, k, v, segments, merge_gradient=merge_gradient)
    plain = attend(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
    torch.testing.assert_close(merged, plain)
    grad = torch.randn_like(merged)
    torch.testing.assert_close(
        torch.autograd.grad(merged, (q, k, v), grad), torch.autograd.grad(plain, (q, k, v), grad)
    )


def test_a_branch_that_stands_twice_changes_nothing() -> None:
    q, k, v = inputs()
    once, twice = (
        merge(q, k, v, Dilation((4,) * n, (1,) * n).segments(q, causal=True)) for n in (1, 2)
    )
    torch.testing.assert_close(once, twice)


@every_gradient
def test_half_precision_is_as_good_as_its_inputs(merge_gradient: str) -> None:
    q, k, v = inputs(torch.bfloat16)
    merged = merge(q, k, v, BRANCHES.segments(q, causal=True), merge_gradient=merge_gradient)
    assert merged.dtype == torch.bfloat16
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = by_autograd(wide[0], wide[1], wide[2], constant_shares=merge_gradient != "exact")
    torch.testing.assert_close(merged.double(), expected, atol=0.02, rtol=0.02)
    grad = torch.randn_like(merged)
    grads = torch.autograd.grad(merged, (q, k, v), grad)
    exact = torch.autograd.grad(expected, wide, grad.double())
    for actual, right in zip(grads, exact, strict=True):
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.double(), right, atol=0.05, rtol=0.05)


def saved_elements(run: Callable[[], Tensor]) -> int:
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(sizes)


def test_the_exact_gradient_keeps_one_output_for_all_branches() -> None:
    q, k, v = inputs()
    segments = Dilation((7, 7), (1, 1)).segments(q, causal=True)
    exact, constant = (
        saved_elements(lambda g=gradient: merge(q, k, v, segments, merge_gradient=g))
        for gradient in ("exact", "torchscale")
    )
    assert constant - exact == q.numel()
