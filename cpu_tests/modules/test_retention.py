from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalerun.modules.block_context import BlockContext
from scalerun.modules.incremental_state import IncrementalState
from scalerun.modules.init import LinearInit, normal
from scalerun.modules.retention import NORM_EPS_MODES, Retention, RetentionInit

DIM, VALUES, HEADS, TIME = 8, 12, 2, 11
ROUGH = LinearInit(normal(0.6), normal(0.3))


@pytest.fixture
def make(ready: Callable[[nn.Module], nn.Module]) -> Callable[..., Retention]:
    """A float64 layer with rough weights; a large eps makes denominators visible."""

    def build(*, scale: float = 1.0, heads: int = HEADS, **settings: Any) -> Retention:
        init = RetentionInit(q=ROUGH, k=ROUGH, v=ROUGH, g=ROUGH, out=ROUGH)
        layer = ready(Retention(DIM, VALUES, heads, init=init, **{"norm_eps": 1e-3, **settings}))
        assert isinstance(layer, Retention)
        with torch.no_grad():
            layer.k_proj.weight *= scale
        return layer.eval()

    return build


@pytest.fixture
def x_BTD() -> Tensor:
    return torch.randn(3, TIME, DIM, generator=torch.Generator().manual_seed(0)).double()


def context_of(
    num_tokens: int, *, places: IncrementalState | None = None, padding: Tensor | None = None
) -> BlockContext:
    """What a decoder tells its layers of the next tokens; ``places`` counts them."""
    if places is None:
        places = IncrementalState([], batch_size=3, max_length=num_tokens)
    positions, _, padding_BS = places.place(
        padding, num_tokens=num_tokens, device=torch.device("cpu")
    )
    start = places.length
    places.advance(num_tokens)
    return BlockContext(causal=True, positions_BT=positions, padding_BS=padding_BS, start=start)


def in_pieces(
    layer: Retention, x_BTD: Tensor, cuts: list[int], padding: Tensor | None = None
) -> Tensor:
    """The layer's output for a sequence that it is handed in pieces, with a state."""
    state = layer.init_state(len(x_BTD), TIME)
    places = IncrementalState([], batch_size=len(x_BTD), max_length=TIME)
    read, begin = [], 0
    for piece in x_BTD.split(cuts, 1):
        end = begin + piece.shape[1]
        pad = None if padding is None else padding[:, begin:end]
        context = context_of(piece.shape[1], places=places, padding=pad)
        read.append(layer(piece, replace(context, state=state)))
        begin = end
    return torch.cat(read, 1)


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the float32 tables of angles and decays."""
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=2e-6)


# The slow version: formulas on lists of vectors, in float64, one head and one token at a time.


def rotated(vector: Tensor, position: int) -> Tensor:
    half = len(vector) // 2
    out = torch.zeros_like(vector)
    for i in range(half):
        theta = 1 / 10000 ** (i / (half - 1) if half > 1 else 0.0)
        cos, sin = math.cos(position * theta), math.sin(position * theta)
        a, b = vector[2 * i], vector[2 * i + 1]
        out[2 * i], out[2 * i + 1] = a * cos - b * sin, b * cos + a * sin
    return out


def slow_parallel(
    q: list[Tensor], k: list[Tensor], v: list[Tensor], g: float, mode: str
) -> list[Tensor]:
    out = []
    for n in range(len(q)):
        total = sum(g ** (n - m) for m in range(n + 1))
        row = [g ** (n - m) / total**0.5 * float(q[n] @ k[m]) for m in range(n + 1)]
        denominator = 1.0
        if mode == "torchscale":
            denominator = min(max(sum(abs(a) for a in row), 1.0), 5e4)
        elif mode == "torchscale_0.3.0":
            denominator = max(abs(sum(row)), 1.0)
        out.append(torch.stack([a / denominator * v[m] for m, a in enumerate(row)]).sum(0))
    return out


def slow_recurrent(q: list[Tensor], k: list[Tensor], v: list[Tensor], g: float) -> list[Tensor]:
    out, total, memory = [], 0.0, torch.zeros(len(k[0]), len(v[0]), dtype=torch.float64)
    for n in range(len(q)):
        before, total = total, g * total + 1
        memory = memory * g * (before / total) ** 0.5 + torch.outer(k[n], v[n]) / total**0.5
        out.append(q[n] @ memory)
    return out


def slow_chunkwise(
    q: list[Tensor], k: list[Tensor], v: list[Tensor], g: float, size: int
) -> list[Tensor]:
    """TorchScale's, with its denominators."""
    sums = [sum(g ** (i - j) for j in range(i + 1)) for i in range(size)]
    memory = torch.zeros(len(k[0]), len(v[0]), dtype=torch.float64)
    kappa, out = 1.0, []
    for begin in range(0, len(q), size):
        count = min(size, len(q) - begin)
        for i in range(count):
            weights = [
                g ** (i - j) / sums[i] ** 0.5 * float(q[begin + i] @ k[begin + j])
                for j in range(i + 1)
            ]
            rho = max(sum(abs(a) for a in weights), 1.0)
            largest = max(rho, kappa)
            inner = torch.stack([a / rho * v[begin + j] for j, a in enumerate(weights)]).sum(0)
            ahead = q[begin + i] * (g ** (i + 1) * sums[-1] / sums[i] ** 0.5) @ (memory / kappa)
            out.append(inner / (largest / rho) + ahead / (largest / kappa))
        if count == size:
            new = [
                g ** (size - 1 - j) / sums[-1] * torch.outer(k[begin + j], v[begin + j])
                for j in range(size)
            ]
            memory = memory * g**size + torch.stack(new).sum(0)
            kappa = max(1.0, memory.abs().sum(0).max().item())
    return out


def slow_retention(
    layer: Retention, x: Tensor, form: Callable[..., list[Tensor]], *settings: Any
) -> Tensor:
    rows = []
    width, value_width = DIM // layer.num_heads, VALUES // layer.num_heads
    for b in range(len(x)):
        q, k, v, gate = (
            x[b] @ part.weight.T
            for part in (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj)
        )
        joined = torch.zeros(len(x[b]), VALUES, dtype=torch.float64)
        for h in range(layer.num_heads):
            keys, values = (
                slice(h * width, (h + 1) * width),
                slice(h * value_width, (h + 1) * value_width),
            )
            read = form(
                [rotated(q[n, keys], n) for n in range(len(q))],
                [rotated(k[n, keys] / width**0.5, n) for n in range(len(k))],
                list(v[:, values]),
                1 - 2.0 ** (-5 - h),
                *settings,
            )
            for n, o in enumerate(read):
                joined[n, values] = o / ((o**2).mean() + layer.norm_eps) ** 0.5
        rows.append((gate * torch.sigmoid(gate) * joined) @ layer.out_proj.weight.T)
    return torch.stack(rows)


@pytest.mark.parametrize("scale", [0.1, 6.0])
@pytest.mark.parametrize("mode", NORM_EPS_MODES)
@torch.no_grad()
def test_the_parallel_form_follows_its_formula(
    mode: str, scale: float, make: Callable[..., Retention], x_BTD: Tensor
) -> None:
    layer = make(norm_eps_mode=mode, scale=scale)
    close(layer(x_BTD, context_of(TIME)), slow_retention(layer, x_BTD, slow_parallel, mode))


@pytest.mark.parametrize("mode", NORM_EPS_MODES)
@torch.no_grad()
def test_the_recurrent_form_follows_its_formula_in_every_mode(
    mode: str, make: Callable[..., Retention], x_BTD: Tensor
) -> None:
    layer = make(norm_eps_mode=mode, scale=6.0)
    close(in_pieces(layer, x_BTD, [1] * TIME), slow_retention(layer, x_BTD, slow_recurrent))


@pytest.mark.parametrize("scale", [0.1, 6.0])
@pytest.mark.parametrize("size", [1, 3, 4, 11, 16])
@torch.no_grad()
def test_the_chunkwise_form_follows_torchscales_formula(
    size: int, scale: float, make: Callable[..., Retention], x_BTD: Tensor
) -> None:
    layer = make(norm_eps_mode="torchscale", scale=scale, chunk_size=size)
    expected = slow_retention(layer, x_BTD, slow_chunkwise, size)
    close(layer(x_BTD, context_of(TIME)), expected)


@torch.no_grad()
def test_denominators_are_visible_in_these_tests(
    make: Callable[..., Retention], x_BTD: Tensor
) -> None:
    """Else the comparisons with the formulas would not tell the forms apart."""
    outputs = [
        make(norm_eps_mode=mode, chunk_size=size, scale=6.0)(x_BTD, context_of(TIME))
        for mode, size in (
            ("scale_free", None),
            ("torchscale", None),
            ("torchscale_0.3.0", None),
            ("torchscale", 4),
        )
    ]
    for i, one in enumerate(outputs):
        for other in outputs[:i]:
            assert (one - other).abs().max().item() > 1e-4


@pytest.mark.parametrize("size", [1, 2, 4, 5, 11, 64])
@torch.no_grad()
def test_scale_free_forms_agree_under_any_chunk_size(
    size: int, make: Callable[..., Retention], x_BTD: Tensor
) -> None:
    layer, whole = make(chunk_size=size), make()
    expected = whole(x_BTD, context_of(TIME))
    torch.testing.assert_close(layer(x_BTD, context_of(TIME)), expected)
    torch.testing.assert_close(in_pieces(whole, x_BTD, [1] * TIME), expected)
    single = layer.float()(x_BTD.float(), context_of(TIME))
    torch.testing.assert_close(single.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("mode", NORM_EPS_MODES)
@pytest.mark.parametrize("cuts", [[5, 1, 3, 1, 1], [1, 10], [11], [4, 4, 3]])
@torch.no_grad()
def test_it_does_not_matter_in_which_pieces_a_state_is_extended(
    cuts: list[int], mode: str, size: int | None, make: Callable[..., Retention], x_BTD: Tensor
) -> None:
    layer = make(norm_eps_mode=mode, chunk_size=size, scale=6.0)
    expected = in_pieces(layer, x_BTD, [1] * TIME)
    torch.testing.assert_close(in_pieces(layer, x_BTD, cuts), expected)


@pytest.mark.parametrize("size", [None, 1, 3, 4])
@pytest.mark.parametrize("cuts", [[11], [1] * 11, [6, 1, 1, 3]])
@torch.no_grad()
def test_padding_anywhere_contributes_nothing(
    cuts: list[int], size: int | None, make: Callable[..., Retention], x_BTD: Tensor
) -> None:
    """Padding on the left, on the right, and in the middle; the real tokens stand as if alone."""
    padding = torch.zeros(3, TIME, dtype=torch.bool)
    padding[0, :5] = padding[1, 8:] = padding[2, 3:6] = True
    layer, alone = make(chunk_size=size), make()
    mixed = in_pieces(layer, x_BTD, cuts, padding)
    direct = layer(x_BTD, context_of(TIME, padding=padding))
    assert mixed.isfinite().all()
    for row in range(3):
        real = ~padding[row]
        expected = alone(x_BTD[row : row + 1, real], context_of(int(real.sum())))[0]
        close(mixed[row, real], expected)
        close(direct[row, real], expected)
    assert torch.equal(mixed[0, :5], torch.zeros(5, DIM).double())


@torch.no_grad()
def test_a_later_token_never_changes_an_earlier_output(
    make: Callable[..., Retention], x_BTD: Tensor
) -> None:
    changed = x_BTD.clone()
    changed[:, 7] += 1
    for size in (None, 4):
        layer = make(chunk_size=size)
        before, after = layer(x_BTD, context_of(TIME)), layer(changed, context_of(TIME))
        assert torch.equal(before[:, :7], after[:, :7])
        assert (before[:, 7:] != after[:, 7:]).any(-1).all()


@pytest.mark.parametrize("size", [None, 2])
def test_gradients_are_those_of_finite_differences(
    size: int | None, make: Callable[..., Retention], x_BTD: Tensor
) -> None:
    layer = make(chunk_size=size)
    x_BTD = x_BTD[:1, :5].requires_grad_()
    context = context_of(5)
    assert torch.autograd.gradcheck(lambda x: layer(x, context), (x_BTD,))


def test_no_gradient_flows_through_torchscales_denominators(
    make: Callable[..., Retention], x_BTD: Tensor
) -> None:
    """With them held fixed, the norm's eps is all that changes: it shrinks by their squares."""
    layer = make(norm_eps_mode="torchscale", scale=6.0)
    q, k, v = (torch.randn(3, HEADS, TIME, width).double() for width in (4, 4, 6))
    q.requires_grad_()
    tables = layer.tables(context_of(TIME), TIME, torch.float64)
    layer.retain(q, k, v, tables, None).sum().backward()
    scores = q.detach() @ k.mT
    decay = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(HEADS)]).double()[:, None, None]
    steps = torch.arange(TIME)[:, None] - torch.arange(TIME)
    kept = torch.tril(decay ** steps.clamp_min(0))
    weights = scores * kept / kept.sum(-1, keepdim=True).sqrt()
    fixed = weights.abs().sum(-1, keepdim=True).clamp(1, 5e4)
    assert (fixed > 1).any()
    ours = kept / kept.sum(-1, keepdim=True).sqrt() / fixed
    expected = (ours * v.sum(-1)[:, :, None, :]) @ k
    assert q.grad is not None
    close(q.grad, expected)


def test_the_state_is_as_large_after_many_tokens_as_after_one(
    make: Callable[..., Retention],
) -> None:
    layer = make().float()
    state: Any = layer.init_state(2, 100)
    places = IncrementalState([], batch_size=2, max_length=100)
    for count in (1, 7, 1, 91):
        context = replace(context_of(count, places=places), state=state)
        layer(torch.randn(2, count, DIM), context)
        assert state.memory_BHKV.shape == (2, HEADS, DIM // HEADS, VALUES // HEADS)
        assert state.memory_BHKV.untyped_storage().nbytes() == 2 * DIM * VALUES // HEADS * 4


@torch.no_grad()
def test_reordered_states_continue_as_their_sources(
    make: Callable[..., Retention], x_BTD: Tensor
) -> None:
    layer, order = make(), torch.tensor([2, 0, 0, 1])
    state = layer.init_state(3, TIME)
    state.reorder(order)
    places = IncrementalState([], batch_size=3, max_length=TIME)
    layer(x_BTD[:, :6], replace(context_of(6, places=places), state=state))
    state.reorder(order)
    rest = layer(x_BTD[order, 6:], replace(context_of(5, places=places), state=state))
    torch.testing.assert_close(rest, layer(x_BTD, context_of(TIME))[order, 6:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_keeps_tables_and_memory_precise(
    dtype: torch.dtype, make: Callable[..., Retention]
) -> None:
    """At position 5000 neither type can tell neighbouring positions apart."""
    exact, rounded = make(heads=1), make(heads=1, chunk_size=3).to(dtype)
    x_BTD = torch.randn(3, TIME, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    places = IncrementalState([], batch_size=3, max_length=5100)
    places.advance(5000)
    context = context_of(TIME, places=places)
    expected = exact(x_BTD.double(), replace(context, state=exact.init_state(3, 1)))
    state: Any = rounded.init_state(3, 1)
    found = rounded(x_BTD, replace(context, state=state))
    assert found.dtype == dtype
    assert state.memory_BHKV.dtype == torch.float32
    assert (found.double() - expected).abs().mean().item() < 0.03 * expected.std().item()


@torch.no_grad()
def test_autocast_changes_rounding_alone(make: Callable[..., Retention]) -> None:
    layer, x_BTD = make(chunk_size=4).float(), torch.randn(3, TIME, DIM)
    expected = layer(x_BTD, context_of(TIME))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for found in (layer(x_BTD, context_of(TIME)), in_pieces(layer, x_BTD, [1] * TIME)):
            assert found.dtype == torch.bfloat16
            assert (found.float() - expected).abs().mean().item() < 0.03 * expected.std().item()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((8, 12, 3), "width 8 is not an even multiple of 3 heads"),
        ((6, 12, 2), "width 6 is not an even multiple of 2 heads"),
        ((8, 9, 2), "value width 9 is not a multiple of 2 heads"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, int, int], words: str) -> None:
    init = RetentionInit(q=ROUGH, k=ROUGH, v=ROUGH, g=ROUGH, out=ROUGH)
    with pytest.raises(ValueError, match=words):
        Retention(*sizes, init=init)
    with pytest.raises(ValueError, match="'torch_scale' is none of"):
        Retention(8, 12, 2, init=init, norm_eps_mode="torch_scale")


def test_weights_and_flops_are_counted(make: Callable[..., Retention]) -> None:
    layer = make()
    assert layer.num_active_weights() == sum(weight.numel() for weight in layer.parameters())
    assert layer.mixing_flops_per_token(5) == 6 * (DIM + VALUES) * 5
    chunked = make(chunk_size=4)
    assert chunked.mixing_flops_per_token(4) == layer.mixing_flops_per_token(4)
    memory = DIM // HEADS * VALUES // HEADS * HEADS
    expected = 6 * (DIM + VALUES) * 4 + 3 * 2 * 2 * memory
    assert chunked.mixing_flops_per_token(5) == chunked.mixing_flops_per_token(500) == expected
