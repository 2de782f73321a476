from __future__ import annotations

import torch

from scalerun.modules.init import initialize
from scalerun.modules.norm import LayerNorm, RMSNorm


def test_layer_norm_follows_its_formula() -> None:
    norm, x = LayerNorm(6, eps=1e-3).double(), torch.randn(4, 6).double()
    initialize(norm, 0)
    with torch.no_grad():
        norm.weight += torch.arange(6)
        norm.bias -= torch.arange(6)
    variance = ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True)
    expected = (x - x.mean(-1, keepdim=True)) / (variance + 1e-3).sqrt()
    torch.testing.assert_close(norm(x), expected * norm.weight + norm.bias)


def test_rms_norm_follows_its_formula() -> None:
    norm, x = RMSNorm(6, eps=1e-3).double(), torch.randn(4, 6).double()
    initialize(norm, 0)
    with torch.no_grad():
        norm.weight += torch.arange(6)
    expected = x / ((x**2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


def test_statistics_are_float32_for_half_precision_input() -> None:
    x = (100 + torch.randn(4, 512)).bfloat16()
    norm = RMSNorm(512).bfloat16()
    initialize(norm, 0)
    wide = x.float()
    expected = (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()).bfloat16()
    torch.testing.assert_close(norm(x), expected, rtol=0.01, atol=0)
    layer_norm = LayerNorm(512).bfloat16()
    initialize(layer_norm, 0)
    torch.testing.assert_close(
        layer_norm(x).float(),
        torch.nn.functional.layer_norm(wide, (512,)),
        rtol=0.01,
        atol=0.01,
    )


def test_norms_start_as_identity_scales() -> None:
    norm = LayerNorm(3)
    initialize(norm, 0)
    assert norm.weight.tolist() == [1.0, 1.0, 1.0]
    assert norm.bias.tolist() == [0.0, 0.0, 0.0]
