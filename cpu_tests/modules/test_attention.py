from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalerun.modules.attention import Attention, AttentionInit, attend
from scalerun.modules.block_context import BlockContext
from scalerun.modules.norm import LayerNorm

CAUSAL = BlockContext(causal=True)


def slow_attention(layer: Any, x: Tensor) -> Tensor:
    """Causal attention written head by head and query by query."""
    batch, time, dim = x.shape
    width = dim // layer.num_heads
    mixed = torch.zeros_like(x)
    for b in range(batch):
        q = x[b] @ layer.q_proj.weight.T + layer.q_proj.bias
        k = x[b] @ layer.k_proj.weight.T + layer.k_proj.bias
        v = x[b] @ layer.v_proj.weight.T + layer.v_proj.bias
        for h in range(layer.num_heads):
            part = slice(h * width, (h + 1) * width)
            for t in range(time):
                scores = k[: t + 1, part] @ q[t, part] / width**0.5
                weights = torch.softmax(scores, 0)
                mixed[b, t, part] = weights @ v[: t + 1, part]
    if layer.inner_norm is not None:
        mean = mixed.mean(-1, keepdim=True)
        variance = ((mixed - mean) ** 2).mean(-1, keepdim=True)
        mixed = (mixed - mean) / (variance + layer.inner_norm.eps) ** 0.5
        mixed = mixed * layer.inner_norm.weight + layer.inner_norm.bias
    return mixed @ layer.out_proj.weight.T + layer.out_proj.bias


@pytest.mark.parametrize("inner", [False, True])
def test_attention_follows_its_formula(
    inner: bool,
    attention_init: AttentionInit,
    ready: Callable[[nn.Module], nn.Module],
    x_BTD: Tensor,
) -> None:
    norm = LayerNorm(8) if inner else None
    layer = ready(Attention(8, 2, init=attention_init, inner_norm=norm))
    torch.testing.assert_close(layer(x_BTD, CAUSAL), slow_attention(layer, x_BTD))


def test_gradients_are_those_of_finite_differences(attention: Attention, x_BTD: Tensor) -> None:
    x_BTD = x_BTD[:1, :3].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: attention(x, CAUSAL), (x_BTD,))


def test_a_causal_bias_equals_the_causal_kernel(attention: Attention, x_BTD: Tensor) -> None:
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    bias = torch.zeros(1, 1, 5, 5).masked_fill(hidden, float("-inf"))
    masked = attention(x_BTD, BlockContext(bias_BHTS=bias))
    torch.testing.assert_close(masked, attention(x_BTD, CAUSAL))


def test_empty_rows_mix_to_zero(attention: Attention, x_BTD: Tensor) -> None:
    empty = torch.zeros(2, 1, 5, 1, dtype=torch.bool)
    empty[0, 0, 1] = True
    context = BlockContext(bias_BHTS=torch.zeros(1, 1, 5, 5), empty_rows_B1T1=empty)
    y_BTD = attention(x_BTD, context)
    torch.testing.assert_close(y_BTD[0, 1], attention.out_proj.bias)
    torch.testing.assert_close(y_BTD[1], attention(x_BTD, BlockContext())[1])


def test_dropout_acts_in_training_alone(
    attention_init: AttentionInit, ready: Callable[[nn.Module], nn.Module], x_BTD: Tensor
) -> None:
    layer = ready(Attention(8, 2, init=attention_init, dropout=0.5))
    assert not torch.equal(layer(x_BTD, CAUSAL), layer(x_BTD, CAUSAL))
    layer.eval()
    assert torch.equal(layer(x_BTD, CAUSAL), layer(x_BTD, CAUSAL))


def test_half_precision_scores_take_a_float32_bias() -> None:
    q = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16)
    bias = torch.randn(1, 2, 4, 4)
    assert attend(q, q, q, bias_BHTS=bias).dtype == torch.bfloat16


def test_heads_must_divide_the_width(attention_init: AttentionInit) -> None:
    with pytest.raises(ValueError, match="width 10 is not a multiple of 4 heads"):
        Attention(10, 4, init=attention_init)


def test_weights_and_flops_are_counted(attention: Attention) -> None:
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj)
    assert attention.num_active_weights() == sum(layer.weight.numel() for layer in projections)
    assert attention.mixing_flops_per_token(5) == 12 * 8 * 5
