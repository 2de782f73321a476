import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scalerun.optim.clip import clip_grad_norm, total_norm


def params_with(*grads):
    params = []
    for grad in grads:
        params.append(nn.Parameter(torch.zeros_like(grad)))
        params[-1].grad = grad.clone()
    return params


def random_grads(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype) for s in ((3, 4), (5,), (), (2, 2, 2))]


@pytest.mark.parametrize(("norm_type", "order"), [("l2", 2.0), ("inf", math.inf)])
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 100.0])
def test_it_is_torchs_clipping(norm_type, order, max_norm):
    ours, theirs = params_with(*random_grads()), params_with(*random_grads())
    norm = clip_grad_norm(ours, max_norm, norm_type)
    assert norm == torch.nn.utils.clip_grad_norm_(theirs, max_norm, order)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.grad, other.grad)


def test_reference_values():
    grads = [torch.arange(1.0, 6.0)] * 3
    assert clip_grad_norm(params_with(*grads), 0, "l2").item() == pytest.approx(math.sqrt(165))
    assert clip_grad_norm(params_with(*grads), 0, "inf").item() == 5
    params = params_with(*grads)
    clip_grad_norm(params, 1.0)
    assert clip_grad_norm(params, 0).item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("norm_type", ["l2", "inf"])
def test_a_limit_of_zero_reports_and_leaves_the_gradients(norm_type):
    grads = random_grads()
    params = params_with(*grads)
    assert clip_grad_norm(params, 0, norm_type) > 0
    assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))


@given(st.floats(1e-3, 1e3), st.integers(0, 100), st.sampled_from(["l2", "inf"]))
def test_afterwards_the_norm_obeys_the_limit(max_norm, seed, norm_type):
    params = params_with(*random_grads(seed))
    before = clip_grad_norm(params, max_norm, norm_type).item()
    after = clip_grad_norm(params, 0, norm_type).item()
    assert after <= max_norm * (1 + 1e-6)
    assert after == pytest.approx(min(before, max_norm), rel=1e-3)


def test_half_precision_gradients_are_summed_in_float32():
    many = torch.full((70_000,), 1.0, dtype=torch.bfloat16)
    assert total_norm([many]).dtype == torch.float32
    assert total_norm([many]).item() == pytest.approx(math.sqrt(70_000), rel=1e-5)
    large = torch.full((4,), 60_000.0, dtype=torch.float16)
    assert total_norm([large]).item() == pytest.approx(120_000, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", ["l2", "inf"])
def test_a_value_that_is_not_finite_shows_in_the_norm(bad, norm_type):
    grads = random_grads()
    grads[1][2] = bad
    assert not math.isfinite(clip_grad_norm(params_with(*grads), 1.0, norm_type))


def test_without_gradients_the_norm_is_zero():
    assert clip_grad_norm([nn.Parameter(torch.ones(2))], 1.0) == 0
