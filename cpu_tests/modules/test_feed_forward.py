from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalerun.modules.block_context import BlockContext
from scalerun.modules.feed_forward import GLU, FeedForward, FeedForwardInit
from scalerun.modules.norm import LayerNorm

Ready = Callable[[nn.Module], nn.Module]


def test_ffn_follows_its_formula(ffn_init: FeedForwardInit, ready: Ready, x_BTD: Tensor) -> None:
    ffn = ready(FeedForward(8, 12, init=ffn_init, activation=F.gelu, inner_norm=LayerNorm(12)))
    h = x_BTD @ ffn.fc1.weight.T + ffn.fc1.bias
    h = 0.5 * h * (1 + torch.erf(h / 2**0.5))
    h = F.layer_norm(h, (12,)) * ffn.inner_norm.weight + ffn.inner_norm.bias
    y, aux_loss = ffn(x_BTD, BlockContext())
    torch.testing.assert_close(y, h @ ffn.fc2.weight.T + ffn.fc2.bias)
    assert aux_loss is None
    assert ffn.num_active_weights() == 2 * 8 * 12


def test_glu_activates_fc1_and_not_the_gate(
    ffn_init: FeedForwardInit, ready: Ready, x_BTD: Tensor
) -> None:
    glu = ready(GLU(8, 12, init=ffn_init, activation=F.silu))
    h = x_BTD @ glu.fc1.weight.T
    h = h * torch.sigmoid(h) * (x_BTD @ glu.gate.weight.T)
    torch.testing.assert_close(glu(x_BTD, BlockContext())[0], h @ glu.fc2.weight.T)
    assert glu.num_active_weights() == 3 * 8 * 12
    assert not any("bias" in name for name, _ in glu.named_parameters())


@pytest.mark.parametrize("kind", [FeedForward, GLU])
def test_gradients_are_those_of_finite_differences(
    kind: type[FeedForward] | type[GLU], ffn_init: FeedForwardInit, ready: Ready, x_BTD: Tensor
) -> None:
    ffn = ready(kind(8, 6, init=ffn_init, activation=F.gelu, inner_norm=LayerNorm(6)))
    x_BTD = x_BTD[:1, :2].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ffn(x, BlockContext())[0], (x_BTD,))


@pytest.mark.parametrize("kind", [FeedForward, GLU])
def test_activation_dropout_acts_in_training_alone(
    kind: type[FeedForward] | type[GLU], ffn_init: FeedForwardInit, ready: Ready, x_BTD: Tensor
) -> None:
    ffn = ready(kind(8, 6, init=ffn_init, activation=F.relu, activation_dropout=0.5))
    assert not torch.equal(ffn(x_BTD, BlockContext())[0], ffn(x_BTD, BlockContext())[0])
    ffn.eval()
    assert torch.equal(ffn(x_BTD, BlockContext())[0], ffn(x_BTD, BlockContext())[0])


@pytest.mark.parametrize("activation", [F.relu, F.gelu, F.silu])
def test_half_precision_activations_are_computed_in_float32(
    activation: Callable[[Tensor], Tensor],
) -> None:
    x = torch.randn(4096).bfloat16()
    assert torch.equal(activation(x), activation(x.float()).bfloat16())
