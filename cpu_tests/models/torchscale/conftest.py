"""State dicts in TorchScale's names whose values are a formula, so that they need no file."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

VOCAB, DIM, HEADS, FFN, LAYERS, ROWS = 23, 32, 4, 48, 3, 40


def golden_tensor(key: str, *shape: int) -> Tensor:
    """Weights as a function of the key and the index."""
    shift = sum(key.encode()) % 97
    index = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    values = 0.2 * torch.sin(0.37 * index**2 + shift)
    if len(shape) == 1 and key.endswith("weight"):
        values = values + 1
    return values.reshape(shape).float()


def stack_shapes(
    *,
    side: str,
    inner_norm: bool = True,
    final_norm: bool = True,
    embedding_norm: bool = False,
    buckets: int = 0,
    halves: tuple[str, ...] = ("",),
    cross: bool = False,
    output: bool = True,
    dim: int = DIM,
    heads: int = HEADS,
) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of an encoder's or a decoder's state dict, without prefix.

    Args:
        halves: ``(".A", ".B")`` for multiway layers.
    """
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCAB, dim)}
    for half in halves:
        shapes[f"embed_positions{half}.weight"] = (ROWS, dim)
    if output:
        shapes["output_projection.weight"] = (VOCAB, dim)
    for i in range(LAYERS):
        layer = f"layers.{i}"
        for half in halves:
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                shapes[f"{layer}.self_attn.{name}{half}.weight"] = (dim, dim)
                shapes[f"{layer}.self_attn.{name}{half}.bias"] = (dim,)
            shapes[f"{layer}.ffn{half}.fc1.weight"] = (FFN, dim)
            shapes[f"{layer}.ffn{half}.fc1.bias"] = (FFN,)
            shapes[f"{layer}.ffn{half}.fc2.weight"] = (dim, FFN)
            shapes[f"{layer}.ffn{half}.fc2.bias"] = (dim,)
            norms = {"self_attn_layer_norm" + half: dim, "final_layer_norm" + half: dim}
            if inner_norm:
                norms |= {f"self_attn.inner_attn_ln{half}": dim, f"ffn{half}.ffn_layernorm": FFN}
            for name, width in norms.items():
                shapes[f"{layer}.{name}.weight"] = shapes[f"{layer}.{name}.bias"] = (width,)
        if cross:
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                shapes[f"{layer}.encoder_attn.{name}.weight"] = (dim, dim)
                shapes[f"{layer}.encoder_attn.{name}.bias"] = (dim,)
            for kind in ("weight", "bias"):
                shapes[f"{layer}.encoder_attn_layer_norm.{kind}"] = (dim,)
    ends = ["layer_norm"] * final_norm + ["layernorm_embedding"] * embedding_norm
    for name in ends:
        for half in halves:
            shapes[f"{name}{half}.weight"] = shapes[f"{name}{half}.bias"] = (dim,)
    if buckets:
        tables = {"encoder": ["relative_position"], "decoder": ["self_attn_relative_position"]}
        for name in tables[side] + ["cross_attn_relative_position"] * cross:
            shapes[f"{name}.relative_attention_bias.weight"] = (buckets, heads)
    return shapes


StateMaker = Callable[..., dict[str, Tensor]]


@pytest.fixture
def golden_state() -> StateMaker:
    """A stack's state dict; arguments as :func:`stack_shapes`."""

    def make(*, prefix: str = "", **options: object) -> dict[str, Tensor]:
        shapes = stack_shapes(**options)  # type: ignore[arg-type]
        return {prefix + key: golden_tensor(prefix + key, *shape) for key, shape in shapes.items()}

    return make


@pytest.fixture
def golden_tensors() -> Callable[[dict[str, tuple[int, ...]]], dict[str, Tensor]]:
    """Tensors of any keys and shapes."""
    return lambda shapes: {key: golden_tensor(key, *shape) for key, shape in shapes.items()}


@pytest.fixture
def fill_golden() -> Callable[..., Tensor]:
    """One tensor of a state dict, from its key and its shape."""
    return golden_tensor


@pytest.fixture
def golden_tokens() -> Tensor:
    """(2, 13) token numbers below 23."""
    b, t = torch.arange(2)[:, None], torch.arange(13)[None]
    return (7 * b**2 + 3 * t**2 + 5 * t + 1) % VOCAB


@pytest.fixture
def check_golden() -> Callable[..., None]:
    """Compares logits (2, 13, 23) with recorded ones."""

    def check(logits: Tensor, ends: list[float], total: float, total_abs: float | None) -> None:
        found = torch.cat((logits[0, 0, :3], logits[1, 8, -3:]))
        torch.testing.assert_close(found, torch.tensor(ends), atol=3e-6, rtol=0)
        assert logits.double().sum().item() == pytest.approx(total, abs=1e-4)
        if total_abs is not None:
            assert logits.double().abs().sum().item() == pytest.approx(total_abs, abs=2e-4)

    return check


@pytest.fixture
def encoder_sizes() -> dict[str, int]:
    return {
        "encoder_embed_dim": DIM,
        "encoder_attention_heads": HEADS,
        "encoder_ffn_embed_dim": FFN,
        "encoder_layers": LAYERS,
    }


@pytest.fixture
def decoder_sizes() -> dict[str, int]:
    return {
        "decoder_embed_dim": DIM,
        "decoder_attention_heads": HEADS,
        "decoder_ffn_embed_dim": FFN,
        "decoder_layers": LAYERS,
    }
