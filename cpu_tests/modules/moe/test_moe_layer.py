from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import scalerun.modules.moe.dispatch as dispatch_module
from scalerun.modules.block_context import BlockContext
from scalerun.modules.feed_forward import FeedForward, FeedForwardInit
from scalerun.modules.init import initialize
from scalerun.modules.moe.moe_layer import MoELayer

Make = Callable[..., MoELayer]


@pytest.fixture(params=[0, 1000], ids=["by_groups", "by_batches"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to multiply rows by their experts' matrices, in float32."""
    monkeypatch.setattr(dispatch_module, "FEW_ROWS", request.param)


either_layout = pytest.mark.usefixtures("layout")
PLAIN = BlockContext(causal=True)


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(layer: MoELayer, y: Tensor, loss: Tensor, x: Tensor) -> list[Tensor]:
    total = (y * tokens(*y.shape, seed=9, dtype=y.dtype)).sum() + 3.0 * loss
    wanted = [x, *layer.parameters()]
    return list(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))


@settings(max_examples=60)
@given(data=st.data())
def test_it_is_the_one_hot_formula(
    data: st.DataObject, make_layer: Make, reference_layer: Callable[..., Any]
) -> None:
    draw = data.draw
    layer = make_layer(
        draw(st.sampled_from([1, 2, 3, 5, 16])),
        gate=draw(st.sampled_from(["linear", "xmoe", "xmoe_cosine"])),
        norm=draw(st.sampled_from([None, "layer_norm", "rms_norm"])),
        mask_padding=draw(st.booleans()),
        time_major=draw(st.booleans()),
        top_k=draw(st.sampled_from([1, 2])),
        second_expert=draw(st.sampled_from(["all", "random"])),
        normalize_before_dropping=draw(st.booleans()),
        eval_capacity_fraction=draw(st.sampled_from([-1.0, 0.25, 0.5, 1.0])),
        deterministic_eval=draw(st.booleans()),
    )
    layer.train(draw(st.booleans()))
    x = tokens(draw(st.integers(1, 3)), draw(st.integers(1, 9)), 8, seed=draw(st.integers(0, 99)))
    x.requires_grad_()
    padding = None
    if draw(st.booleans()):
        padding = tokens(*x.shape[:2], seed=draw(st.integers(0, 99))) > 0.3
    context = BlockContext(causal=True, padding_BS=padding)
    draws = {}
    if layer.training or not layer.router.gating.deterministic_eval:
        torch.manual_seed(5)
        draws["uniform_S"] = torch.rand(x.shape[0] * x.shape[1], dtype=x.dtype)
    torch.manual_seed(5)
    y, report = layer(x, context)
    assert report is not None
    slow_y, expected = reference_layer(layer, x, padding, **draws)
    torch.testing.assert_close(y, slow_y)
    torch.testing.assert_close(report.loss, expected.loss)
    assert report.stats.keys() == expected.stats.keys()
    for name, value in expected.stats.items():
        torch.testing.assert_close(report.stats[name], value.float(), rtol=1e-5, atol=1e-4)
    fast = gradients(layer, y, report.loss, x)
    slow = gradients(layer, slow_y, expected.loss, x)
    torch.testing.assert_close(fast, slow)


@either_layout
@pytest.mark.parametrize("norm", [None, "layer_norm", "rms_norm"])
def test_float32_is_float64(norm: str | None, make_layer: Make) -> None:
    x = tokens(3, 11, 8).requires_grad_()
    slow = make_layer(5, norm=norm, second_expert="all")
    fast = make_layer(5, norm=norm, second_expert="all", dtype=torch.float32)
    slow_y, slow_report = slow(x, PLAIN)
    fast_x = x.detach().float().requires_grad_()
    fast_y, fast_report = fast(fast_x, PLAIN)
    torch.testing.assert_close(fast_y.double(), slow_y, rtol=1e-4, atol=1e-5)
    fast_grads = gradients(fast, fast_y, fast_report.loss, fast_x)
    slow_grads = gradients(slow, slow_y, slow_report.loss, x)
    for one, other in zip(fast_grads, slow_grads, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4)


@either_layout
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("before", [True, False])
def test_one_expert_is_a_dense_feed_forward_layer(
    top_k: int, before: bool, dtype: torch.dtype, make_layer: Make, ffn_init: FeedForwardInit
) -> None:
    moe = make_layer(1, top_k=top_k, normalize_before_dropping=before, dtype=dtype)
    dense = FeedForward(8, 12, init=ffn_init, activation=torch.nn.functional.gelu).to(dtype)
    experts = moe.experts
    with torch.no_grad():
        for name in ("fc1", "fc2"):
            layer = getattr(dense, name)
            layer.weight.copy_(getattr(experts, f"{name}_weight")[0])
            layer.bias.copy_(getattr(experts, f"{name}_bias")[0])
    x = tokens(2, 7, 8, dtype=dtype)
    y, report = moe(x, PLAIN)
    torch.testing.assert_close(y, dense(x, PLAIN)[0])
    assert report.loss.item() == pytest.approx(1.0)


@pytest.mark.parametrize("time_major", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fraction", [-1.0, 0.3])
def test_padding_changes_nothing(
    time_major: bool, training: bool, fraction: float, make_layer: Make
) -> None:
    layer = make_layer(
        3, time_major=time_major, second_expert="all", eval_capacity_fraction=fraction
    ).train(training)
    x = tokens(2, 6, 8)
    wide = tokens(2, 11, 8, seed=1)
    wide[:, 3:9] = x
    padding = torch.ones(2, 11, dtype=torch.bool)
    padding[:, 3:9] = False
    y, report = layer(x, PLAIN)
    wide_y, wide_report = layer(wide, BlockContext(padding_BS=padding))
    torch.testing.assert_close(wide_y[:, 3:9], y)
    assert not wide_y[padding].any()
    torch.testing.assert_close(wide_report.loss, report.loss)
    torch.testing.assert_close(wide_report.stats, report.stats)


def test_without_the_mask_padding_takes_places_as_in_torchscale(make_layer: Make) -> None:
    layer = make_layer(3, mask_padding=False).eval()
    x = tokens(2, 6, 8)
    padding = tokens(2, 6) > 0
    assert torch.equal(layer(x, BlockContext(padding_BS=padding))[0], layer(x, PLAIN)[0])


@either_layout
def test_nothing_but_padding_gives_zeros_and_no_gradient(make_layer: Make) -> None:
    for dtype in (torch.float32, torch.float64):
        layer = make_layer(3, dtype=dtype)
        x = tokens(2, 3, 8, dtype=dtype).requires_grad_()
        y, report = layer(x, BlockContext(padding_BS=torch.ones(2, 3, dtype=torch.bool)))
        assert not y.any()
        assert report.loss == 0
        assert not any(gradient.any() for gradient in gradients(layer, y, report.loss, x))


def test_time_major_is_the_other_order_of_the_same_tokens(make_layer: Make) -> None:
    rules = {"second_expert": "all", "eval_capacity_fraction": 0.1}
    by_sample, by_time = (make_layer(time_major=flag, **rules).eval() for flag in (False, True))
    x = tokens(3, 7, 8)
    swapped = by_sample(x.transpose(0, 1), PLAIN)[0].transpose(0, 1)
    torch.testing.assert_close(by_time(x, PLAIN)[0], swapped)
    assert not torch.allclose(by_time(x, PLAIN)[0], by_sample(x, PLAIN)[0])


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("gate", ["linear", "xmoe", "xmoe_cosine"])
def test_gradients_are_finite_differences(top_k: int, gate: str, make_layer: Make) -> None:
    layer = make_layer(3, gate=gate, norm="layer_norm", top_k=top_k, second_expert="all").eval()
    x = tokens(1, 5, 8).requires_grad_()
    parameters = [parameter for parameter in layer.parameters() if parameter.ndim < 3]

    def function(*_: Tensor) -> tuple[Tensor, Tensor]:
        y, report = layer(x, PLAIN)
        return y, report.loss

    assert torch.autograd.gradcheck(function, (x, *parameters))


@pytest.mark.parametrize("gate", ["linear", "xmoe", "xmoe_cosine"])
def test_two_forwards_before_one_backward(gate: str, make_layer: Make) -> None:
    layer = make_layer(4, gate=gate, second_expert="all").train()
    first, second = tokens(2, 5, 8), tokens(2, 5, 8, seed=1)
    one_by_one = [
        gradients(layer, *_output(layer, x), x.requires_grad_())[1:] for x in (first, second)
    ]
    outputs = [_output(layer, x) for x in (first, second)]
    together = [
        gradients(layer, *output, x)[1:] for output, x in zip(outputs, (first, second), strict=True)
    ]
    torch.testing.assert_close(together, one_by_one)


def _output(layer: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    y, report = layer(x, PLAIN)
    assert report is not None
    return y, report.loss


@pytest.mark.parametrize("gate", ["linear", "xmoe", "xmoe_cosine"])
def test_the_numbers_of_the_experts_mean_nothing(gate: str, make_layer: Make) -> None:
    layer, shuffled = (make_layer(6, gate=gate, second_expert="all") for _ in range(2))
    order = torch.randperm(6)
    with torch.no_grad():
        for name, parameter in shuffled.named_parameters():
            if parameter.shape[0] == 6 and "reduction" not in name:
                parameter.copy_(parameter[order])
    x = tokens(4, 9, 8)
    y, report = layer(x, PLAIN)
    other_y, other = shuffled(x, PLAIN)
    torch.testing.assert_close(other_y, y)
    torch.testing.assert_close(other.loss, report.loss)
    load = report.stats.pop("expert_load")
    torch.testing.assert_close(other.stats.pop("expert_load"), load[order])
    torch.testing.assert_close(other.stats, report.stats)


@either_layout
@pytest.mark.parametrize("gating_float32", [True, False])
def test_bfloat16_autocast_is_near_float32(gating_float32: bool, make_layer: Make) -> None:
    layer = make_layer(
        4, norm="layer_norm", second_expert="all", dtype=torch.float32, float32=gating_float32
    )
    x = tokens(2, 16, 8, dtype=torch.float32).requires_grad_()
    exact, report = layer(x, PLAIN)
    with torch.autocast("cpu", torch.bfloat16):
        y, rough_report = layer(x, PLAIN)
    assert y.dtype == torch.bfloat16
    assert rough_report.loss.dtype == torch.float32
    assert (y.float() - exact).square().mean() < 0.05 * exact.square().mean()
    if gating_float32:
        assert torch.equal(rough_report.loss, report.loss)
    grads = gradients(layer, y, rough_report.loss, x)
    assert all(gradient.isfinite().all() for gradient in grads)
    assert all(gradient.dtype == torch.float32 for gradient in grads)


@either_layout
def test_recomputation_gives_the_same_routing(make_layer: Make) -> None:
    layer = make_layer(4, gate="xmoe", dtype=torch.float32, rates=(0.2, 0.1)).train()
    x = tokens(3, 9, 8, dtype=torch.float32).requires_grad_()
    found = []
    for recompute in (False, True):
        torch.manual_seed(7)
        if recompute:
            y, report = checkpoint(layer, x, PLAIN, use_reentrant=False)
        else:
            y, report = layer(x, PLAIN)
        found.append((y.detach(), gradients(layer, y, report.loss, x)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


class Watch(TorchDispatchMode):
    """Counts operators and remembers the largest tensor that any of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                self.largest = max(self.largest, made.numel())
        return result


@either_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gate", ["linear", "xmoe"])
def test_work_does_not_grow_with_the_number_of_experts(
    gate: str, dtype: torch.dtype, make_layer: Make
) -> None:
    calls, num_tokens = [], 256
    for num_experts in (4, 64):
        layer = make_layer(num_experts, gate=gate, norm="layer_norm", dtype=dtype)
        x = tokens(2, num_tokens // 2, 8, dtype=dtype).requires_grad_()
        with Watch() as watch:
            y, report = layer(x, PLAIN)
            (y.sum() + report.loss).backward()
        calls.append(watch.calls)
        places = 2 * num_tokens
        weights = num_experts * 8 * 12
        assert watch.largest <= max(places * 12, weights, num_tokens * num_experts)
        assert watch.largest < num_tokens * places / 4
    assert calls[0] == calls[1]


def test_capacity_can_let_a_later_token_change_an_earlier_one(make_layer: Make) -> None:
    """A first choice takes its place before any second choice, wherever it stands."""
    x = tokens(1, 12, 8)
    changed = x.clone()
    changed[:, 8:] = tokens(1, 4, 8, seed=3)
    for fraction, causal in ((1.0, True), (0.5, False)):
        layer = make_layer(2, second_expert="all", eval_capacity_fraction=fraction).eval()
        before, after = layer(x, PLAIN)[0][:, :8], layer(changed, PLAIN)[0][:, :8]
        assert torch.allclose(before, after) == causal


def test_dropout_acts_in_training_alone(make_layer: Make) -> None:
    x = tokens(2, 9, 8)
    plain = make_layer(second_expert="all")
    for rates in ((0.3, 0.0), (0.0, 0.3)):
        layer = make_layer(second_expert="all", rates=rates)
        assert not torch.allclose(layer.train()(x, PLAIN)[0], plain(x, PLAIN)[0])
        assert torch.equal(layer.eval()(x, PLAIN)[0], plain.eval()(x, PLAIN)[0])


def test_a_token_is_multiplied_with_its_experts_and_the_gate(make_layer: Make) -> None:
    assert make_layer(4, top_k=2).num_active_weights() == 2 * 2 * 8 * 12 + 4 * 8
    assert make_layer(4, top_k=1, gate="xmoe").num_active_weights() == (
        2 * 8 * 12 + 16 * 8 + 16 * 4
    )


def test_initial_weights_of_an_expert_are_those_of_a_dense_layer(make_layer: Make) -> None:
    layer = make_layer(7)
    initialize(layer, 3)
    weights = layer.experts.fc1_weight
    assert weights.std(dim=(1, 2)).tolist() == pytest.approx([0.4] * 7, rel=0.3)
    assert len({row[0, 0].item() for row in weights}) == 7
