from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from scalerun.modules.attention import Attention, AttentionInit
from scalerun.modules.block_context import BlockContext
from scalerun.modules.dilated_attention import DilatedAttention
from scalerun.modules.dilation import Dilation
from scalerun.modules.init import LinearInit, initialize, normal
from scalerun.modules.norm import LayerNorm

ROUGH = LinearInit(normal(0.4), normal(0.3))
INIT = AttentionInit(q=ROUGH, k=ROUGH, v=ROUGH, out=ROUGH)


def make(dilation: Dilation, *, dim: int = 12, heads: int = 3, **options: Any) -> DilatedAttention:
    """A float64 mixer in evaluation."""
    mixer = DilatedAttention(dim, heads, init=INIT, dilation=dilation, **options)
    initialize(mixer, 3)
    return mixer.double().eval()


def slowly(mixer: DilatedAttention, x_TD: Tensor, *, causal: bool) -> Tensor:
    """One sequence, each query on its own, as the paper says it."""
    dilation, heads = mixer.dilation, mixer.num_heads
    q, k, v = (
        layer(x_TD).unflatten(1, (heads, -1))
        for layer in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    rows = []
    for t in range(len(x_TD)):
        for h in range(heads):
            outs, lses = [], []
            for w, r in dilation.branches():
                offset = h % r if dilation.head_offset == "mod" else h // math.ceil(heads / r)
                start = t // w * w
                end = t + 1 if causal else min(start + w, len(x_TD))
                if (t - start) % r != offset:
                    continue
                keys = list(range(start + offset, end, r))
                scores = k[keys, h] @ q[t, h] / math.sqrt(q.shape[-1])
                lses.append(scores.logsumexp(0))
                outs.append(scores.softmax(0) @ v[keys, h])
            shares = torch.stack(lses).softmax(0) if lses else torch.zeros(0)
            read = [share * out for share, out in zip(shares, outs, strict=True)]
            rows.append(sum(read, torch.zeros_like(q[t, h])))
    joined = torch.stack(rows).view(len(x_TD), -1)
    out: Tensor = mixer.out_proj(joined)
    return out


@st.composite
def dilations(draw: st.DrawFn) -> Dilation:
    ratios = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    lengths = [r * draw(st.integers(1, 5)) for r in ratios]
    head_offset = draw(st.sampled_from(["block", "mod"]))
    return Dilation(tuple(lengths), tuple(ratios), head_offset=head_offset)


@given(dilations(), st.integers(1, 19), st.sampled_from([1, 2, 3, 4, 6]), st.booleans())
@settings(max_examples=40, deadline=None)
@torch.no_grad()
def test_any_length_equals_the_formula(
    dilation: Dilation, num_tokens: int, heads: int, causal: bool
) -> None:
    mixer = make(dilation, heads=heads)
    x = torch.randn(2, num_tokens, 12, dtype=torch.float64)
    mixed = mixer(x, BlockContext(causal=causal))
    expected = torch.stack([slowly(mixer, row, causal=causal) for row in x])
    torch.testing.assert_close(mixed, expected)


@given(dilations(), st.integers(1, 12), st.data(), st.booleans())
@settings(max_examples=40, deadline=None)
@torch.no_grad()
def test_padding_on_any_side_counts_for_nothing(
    dilation: Dilation, num_tokens: int, data: st.DataObject, causal: bool
) -> None:
    mixer = make(dilation)
    x = torch.randn(3, num_tokens, 12, dtype=torch.float64)
    padding = torch.zeros(3, num_tokens, dtype=torch.bool)
    for row in range(3):
        left = data.draw(st.integers(0, num_tokens))
        right = data.draw(st.integers(0, num_tokens - left))
        padding[row, :left] = padding[row, num_tokens - right :] = True
    mixed = mixer(x, BlockContext(causal=causal, padding_BS=padding))
    for row in range(3):
        real = ~padding[row]
        if real.any():
            alone = mixer(x[row : row + 1, real], BlockContext(causal=causal))[0]
            torch.testing.assert_close(mixed[row, real], alone)
    nothing = mixer.out_proj.bias.expand(int(padding.sum()), -1)
    torch.testing.assert_close(mixed[padding], nothing)


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_one_segment_with_ratio_one_is_attention(
    causal: bool, attention: Attention, x_BTD: Tensor
) -> None:
    mixer = make(Dilation((x_BTD.shape[1] + 3,), (1,)), dim=8, heads=2)
    mixer.load_state_dict(attention.state_dict())
    context = BlockContext(causal=causal)
    torch.testing.assert_close(mixer(x_BTD, context), attention(x_BTD, context))


@torch.no_grad()
def test_tokens_that_no_branch_keeps_read_nothing() -> None:
    mixer = make(Dilation((8,), (4,)), heads=2)
    y = mixer(torch.randn(1, 8, 12).double(), BlockContext(causal=True))[0]
    nothing = (y == mixer.out_proj.bias).all(-1).nonzero().flatten()
    assert nothing.tolist() == [2, 3, 6, 7]


@torch.no_grad()
def test_zero_keys_dilute_the_last_segment() -> None:
    """Six tokens in segments of four: the last two also see two keys and values of zeros."""
    mixer = make(Dilation((4,), (1,), zero_keys=True))
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    exact = slowly(mixer, x[0], causal=False)
    mixed = mixer(x, BlockContext())[0]
    torch.testing.assert_close(mixed[:4], exact[:4])
    q, k, v = (
        layer(x[0, 4:]).unflatten(1, (3, 4)).transpose(0, 1)
        for layer in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    weights = (q @ k.mT / 2).exp()
    read = weights @ v / (weights.sum(-1, keepdim=True) + 2)
    torch.testing.assert_close(mixed[4:], mixer.out_proj(read.transpose(0, 1).flatten(1)))
    causal = mixer(x, BlockContext(causal=True))[0]
    torch.testing.assert_close(causal, slowly(mixer, x[0], causal=True))


@torch.no_grad()
def test_zero_keys_leave_padding_of_the_batch_hidden() -> None:
    mixer = make(Dilation((4,), (1,), zero_keys=True))
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    padding = torch.tensor([[False] * 5 + [True]])
    other = torch.cat((x[:, :5], torch.randn(1, 1, 12, dtype=torch.float64)), 1)
    one, two = (mixer(tokens, BlockContext(padding_BS=padding)) for tokens in (x, other))
    torch.testing.assert_close(one, two)


def test_weights_are_dropped_in_training_only() -> None:
    mixer = make(Dilation((4, 8), (1, 2)), dropout=0.5)
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    context = BlockContext(causal=True)
    quiet = mixer(x, context)
    torch.testing.assert_close(quiet[0], slowly(mixer, x[0], causal=True))
    mixer.train()
    assert not torch.allclose(mixer(x, context), quiet)
    with torch.random.fork_rng():
        means = torch.stack([mixer(x, context) for _ in range(600)]).mean(0)
    assert (means - quiet).abs().max() < 0.25 * quiet.std()


@pytest.mark.parametrize("merge_gradient", ["exact", "torchscale"])
def test_gradients_reach_every_weight(merge_gradient: str) -> None:
    mixer = make(Dilation((4, 8), (1, 2), merge_gradient=merge_gradient)).train()
    x = torch.randn(2, 11, 12, dtype=torch.float64, requires_grad=True)
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[0, :4] = True
    mixer(x, BlockContext(padding_BS=padding)).square().sum().backward()
    for name, parameter in [*mixer.named_parameters(), ("input", x)]:
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert "k_proj.bias" in name or (parameter.grad != 0).any(), name


def test_an_unknown_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="give torchscale or exact"):
        Dilation((4,), (1,), merge_gradient="none")


def test_cost_counts_the_keys_of_each_branch() -> None:
    mixer = make(Dilation((4, 16), (1, 4)))
    assert mixer.mixing_flops_per_token(1000) == 12 * 12 * 5
    assert mixer.mixing_flops_per_token(2) == round(12 * 12 * (2 + 2 / 16))
    assert mixer.num_active_weights() == 4 * 12 * 12


def test_inner_norm_and_multiway_are_those_of_attention(
    ready: Callable[[nn.Module], nn.Module],
) -> None:
    x, context = torch.randn(1, 6, 8, dtype=torch.float64), BlockContext(causal=True, split=2)
    options: dict[str, Any] = {"inner_norm": LayerNorm(8, 1e-5), "multiway": True}
    plain = ready(Attention(8, 2, init=INIT, **options)).double()
    dilated = DilatedAttention(8, 2, init=INIT, dilation=Dilation((6,), (1,)), **options).double()
    dilated.load_state_dict(plain.state_dict())
    torch.testing.assert_close(dilated(x, context), plain(x, context))
