from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from scalerun.modules.attention import Attention, AttentionInit
from scalerun.modules.block import TransformerBlock
from scalerun.modules.block_context import BlockContext
from scalerun.modules.feed_forward import FeedForward, FeedForwardInit
from scalerun.modules.norm import LayerNorm
from scalerun.modules.residual import (
    DeepNorm,
    PostNorm,
    PreNorm,
    Residual,
    deepnorm_alpha,
)

CAUSAL = BlockContext(causal=True)


def slow_norm(norm: nn.Module, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    deviation = ((centred**2).mean(-1, keepdim=True) + norm.eps) ** 0.5
    return centred / deviation * norm.weight + norm.bias


def slow_block(block: TransformerBlock, x: Tensor, kind: str, alpha: float) -> Tensor:
    """Both branches as the papers write them."""

    def mix(z: Tensor) -> Tensor:
        return block.mixer(z, CAUSAL)

    def compute(z: Tensor) -> Tensor:
        ffn = block.ffn
        h = torch.relu(z @ ffn.fc1.weight.T + ffn.fc1.bias)
        h = h if ffn.inner_norm is None else slow_norm(ffn.inner_norm, h)
        return h @ ffn.fc2.weight.T + ffn.fc2.bias

    for branch, residual in ((mix, block.mixer_residual), (compute, block.ffn_residual)):
        if kind == "before":
            x = alpha * x + branch(slow_norm(residual.norm, x))
        else:
            x = slow_norm(residual.norm, alpha * x + branch(x))
    return x


@pytest.fixture
def make_block(
    attention_init: AttentionInit,
    ffn_init: FeedForwardInit,
    ready: Callable[[nn.Module], nn.Module],
) -> Callable[..., nn.Module]:
    def make(residual: type[Residual], alpha: float, *, subln: bool) -> nn.Module:
        return ready(
            TransformerBlock(
                Attention(8, 2, init=attention_init, inner_norm=LayerNorm(8) if subln else None),
                FeedForward(
                    8,
                    12,
                    init=ffn_init,
                    activation=torch.relu,
                    inner_norm=LayerNorm(12) if subln else None,
                ),
                mixer_residual=residual(LayerNorm(8), alpha=alpha),
                ffn_residual=residual(LayerNorm(8), alpha=alpha),
            )
        )

    return make


@pytest.mark.parametrize(
    ("residual", "kind", "alpha", "subln"),
    [
        (PreNorm, "before", 1.0, False),
        (PreNorm, "before", 1.0, True),
        (PreNorm, "before", deepnorm_alpha(3), False),
        (PostNorm, "after", 1.0, False),
        (DeepNorm, "after", deepnorm_alpha(3), False),
    ],
    ids=["pre_norm", "subln", "pre_norm_with_alpha", "post_norm", "deep_norm"],
)
def test_the_block_follows_its_formula(
    residual: type[Residual],
    kind: str,
    alpha: float,
    subln: bool,
    make_block: Callable[..., TransformerBlock],
    x_BTD: Tensor,
) -> None:
    block = make_block(residual, alpha, subln=subln)
    fast_in, slow_in = x_BTD.clone().requires_grad_(), x_BTD.clone().requires_grad_()
    fast, aux_loss = block(fast_in, CAUSAL)
    slow = slow_block(block, slow_in, kind, alpha)
    torch.testing.assert_close(fast, slow)
    assert aux_loss is None
    weights = torch.randn_like(fast)
    fast_grad = torch.autograd.grad((fast * weights).sum(), fast_in)
    slow_grad = torch.autograd.grad((slow * weights).sum(), slow_in)
    torch.testing.assert_close(fast_grad, slow_grad)


def test_weights_of_both_branches_are_counted(make_block: Callable[..., TransformerBlock]) -> None:
    assert make_block(PreNorm, 1.0, subln=True).num_active_weights() == 4 * 64 + 2 * 8 * 12
