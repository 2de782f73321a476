import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scalerun.dataclass.errors import ConfigError
from scalerun.optim.clip import check_norm_type, clip_grad_norm, grad_norm

every_type = pytest.mark.parametrize("norm_type", ["l2", "inf", "sparse"])


def params_with(*dense, experts=()):
    """Parameters by name, each with its gradient."""
    names = [f"{i}.weight" for i in range(len(dense))]
    names += [f"{i}.ffn.experts.weight" for i in range(len(experts))]
    params = {}
    for name, grad in zip(names, [*dense, *experts], strict=True):
        params[name] = nn.Parameter(torch.zeros_like(grad))
        params[name].grad = grad.clone()
    return params


def grads_of(params):
    return [param.grad for param in params.values()]


def random_grads(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype) for s in ((3, 4), (5,), (), (2, 2, 2))]


@pytest.mark.parametrize(("norm_type", "order"), [("l2", 2.0), ("inf", math.inf)])
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 100.0])
def test_it_is_torchs_clipping(norm_type, order, max_norm):
    ours, theirs = params_with(*random_grads()), params_with(*random_grads())
    norm = clip_grad_norm(ours, max_norm, norm_type)
    assert norm.total == torch.nn.utils.clip_grad_norm_(theirs.values(), max_norm, order)
    for one, other in zip(grads_of(ours), grads_of(theirs), strict=True):
        assert torch.equal(one, other)


def test_reference_values():
    grads = [torch.arange(1.0, 6.0)] * 3
    assert grad_norm(params_with(*grads), "l2").total.item() == pytest.approx(math.sqrt(165))
    assert grad_norm(params_with(*grads), "inf").total.item() == 5
    params = params_with(*grads)
    clip_grad_norm(params, 1.0)
    assert grad_norm(params).total.item() == pytest.approx(1.0, abs=1e-6)


@every_type
def test_a_limit_of_zero_reports_and_leaves_the_gradients(norm_type):
    grads = random_grads()
    params = params_with(*grads)
    assert clip_grad_norm(params, 0, norm_type).total > 0
    assert all(torch.equal(one, other) for one, other in zip(grads_of(params), grads, strict=True))


@given(
    st.floats(1e-3, 1e3), st.integers(0, 100), st.sampled_from(["l2", "inf", "sparse"]), st.data()
)
def test_afterwards_the_norm_obeys_the_limit(max_norm, seed, norm_type, data):
    experts = [4.0 * torch.randn(e, 2, 2) for e in data.draw(st.lists(st.integers(1, 9)))]
    params = params_with(*random_grads(seed), experts=experts)
    before = clip_grad_norm(params, max_norm, norm_type)
    after = grad_norm(params, norm_type)
    assert after.total.item() <= max_norm * (1 + 1e-6)
    assert after.total.item() == pytest.approx(min(before.total.item(), max_norm), rel=1e-3)
    if experts:
        scale = (after.total / before.total).item()
        assert after.expert.item() == pytest.approx(scale * before.expert.item(), rel=1e-3)


def test_the_worked_example_of_sparse_clipping():
    dense = [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
    params = params_with(
        *dense, experts=[torch.tensor([[6.0], [0.0]]), torch.tensor([[0.0], [8.0]])]
    )
    norm = clip_grad_norm(params, 1.0, "sparse")
    assert norm.total.item() == pytest.approx(8.660254, rel=1e-7)
    assert (norm.dense.item(), norm.expert.item()) == (5.0, 10.0)
    found = [grad.sum().item() for grad in grads_of(params)]
    assert found == pytest.approx([0.11547003 * norm for norm in (3, 4, 6, 8)], rel=1e-6)


def test_the_weight_of_an_expert_is_that_of_its_own_layer():
    dense, few, many = torch.randn(5), torch.randn(2, 3), torch.randn(16, 3)
    squares = [grad.double().square().sum() for grad in (dense, few, many)]
    norm = grad_norm(params_with(dense, experts=[few, many]), "sparse")
    expected = (squares[0] + squares[1] / 2 + squares[2] / 16).sqrt()
    assert norm.total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert norm.expert.item() == pytest.approx((squares[1] + squares[2]).sqrt().item(), rel=1e-6)


def test_parts_are_reported_where_there_are_experts():
    dense, expert = torch.tensor([3.0, -1.0]), torch.tensor([[4.0], [-5.0]])
    assert list(grad_norm(params_with(dense)).stats()) == ["gnorm"]
    stats = grad_norm(params_with(dense, experts=[expert]), "inf").stats()
    found = {name: value.item() for name, value in stats.items()}
    assert found == {"gnorm": 5.0, "gnorm_dense": 3.0, "gnorm_expert": 5.0}


def test_weighing_experts_that_are_not_there_is_refused():
    with pytest.raises(ConfigError, match="--clip-norm-type sparse weighs the gradients of exp"):
        check_norm_type("sparse", ["layers.0.ffn.fc1.weight"])
    check_norm_type("l2", ["layers.0.ffn.fc1.weight"])
    check_norm_type("sparse", ["layers.0.ffn.fc1.weight", "layers.1.ffn.experts.fc1_weight"])


def test_half_precision_gradients_are_summed_in_float32():
    many = torch.full((70_000,), 1.0, dtype=torch.bfloat16)
    norm = grad_norm(params_with(many)).total
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(math.sqrt(70_000), rel=1e-5)
    large = torch.full((4,), 60_000.0, dtype=torch.float16)
    assert grad_norm(params_with(large)).total.item() == pytest.approx(120_000, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@every_type
def test_a_value_that_is_not_finite_shows_in_the_norm_and_nothing_is_multiplied(bad, norm_type):
    grads = random_grads()
    grads[1][2] = bad
    params = params_with(*grads)
    assert not math.isfinite(clip_grad_norm(params, 1.0, norm_type).total)
    for found, grad in zip(grads_of(params), grads, strict=True):
        torch.testing.assert_close(found, grad, rtol=0, atol=0, equal_nan=True)


def test_without_gradients_the_norm_is_zero():
    assert clip_grad_norm({"weight": nn.Parameter(torch.ones(2))}, 1.0).total == 0
