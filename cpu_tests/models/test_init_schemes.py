from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from scalerun.models.base_model import build_model
from scalerun.models.transformer_config import TransformerConfig
from scalerun.modules.residual import deepnorm_gain, subln_gain

DIM, FFN, LAYERS = 64, 128, 3


@pytest.fixture
def spread(make_config: Callable[..., TransformerConfig]) -> Callable[..., dict[str, float]]:
    """Root mean square of every parameter of the first layer, by a short name."""

    def measure(**changes: Any) -> dict[str, float]:
        cfg = make_config(
            decoder_embed_dim=DIM, decoder_ffn_embed_dim=FFN, decoder_learned_pos=True, **changes
        )
        model = build_model(cfg, vocab_size=500, padding_idx=1, seed=1, device=torch.device("cpu"))
        state = model.state_dict()
        return {
            name.removeprefix("layers.0."): tensor.square().mean().sqrt().item()
            for name, tensor in state.items()
            if not name.startswith(("layers.1", "layers.2"))
        }

    return measure


@pytest.mark.parametrize(
    ("changes", "gain"),
    [({}, 1.0), ({"deepnorm": True}, deepnorm_gain(LAYERS)), ({"subln": True}, subln_gain(LAYERS))],
    ids=["plain", "deepnorm", "subln"],
)
def test_papers_scale_value_output_and_ffn(
    changes: dict[str, Any], gain: float, spread: Callable[..., dict[str, float]]
) -> None:
    found = spread(**changes)
    square, wide = math.sqrt(2 / (2 * DIM)), math.sqrt(2 / (DIM + FFN))
    for name in ("q_proj", "k_proj"):
        assert found[f"mixer.{name}.weight"] == pytest.approx(square, rel=0.05)
    for name in ("v_proj", "out_proj"):
        assert found[f"mixer.{name}.weight"] == pytest.approx(gain * square, rel=0.05)
    for name in ("fc1", "fc2"):
        assert found[f"ffn.{name}.weight"] == pytest.approx(gain * wide, rel=0.05)
    assert not any(value for name, value in found.items() if name.endswith("bias"))
    for name in ("embedding.tokens", "embedding.positions", "output_projection"):
        assert found[f"{name}.weight"] == pytest.approx(DIM**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "gain"),
    [({"deepnorm": True}, deepnorm_gain(LAYERS)), ({"subln": True}, subln_gain(LAYERS))],
    ids=["deepnorm", "subln"],
)
def test_torchscale_scales_its_uniform_weights_and_biases(
    changes: dict[str, Any], gain: float, spread: Callable[..., dict[str, float]]
) -> None:
    found = spread(init="torchscale", **changes)
    deviation = DIM**-0.5 / math.sqrt(3)
    for name, factor in (("q_proj", 1.0), ("k_proj", 1.0), ("v_proj", gain), ("out_proj", gain)):
        assert found[f"mixer.{name}.weight"] == pytest.approx(factor * deviation, rel=0.05)
        assert found[f"mixer.{name}.bias"] == pytest.approx(factor * deviation, rel=0.3)
    assert found["ffn.fc1.weight"] == pytest.approx(gain * deviation, rel=0.05)
    assert found["ffn.fc2.weight"] == pytest.approx(gain * FFN**-0.5 / math.sqrt(3), rel=0.05)
    assert found["embedding.positions.weight"] == pytest.approx(1.0, rel=0.05)


def test_megatron_shrinks_what_ends_a_branch(spread: Callable[..., dict[str, float]]) -> None:
    found = spread(init="megatron", megatron_init_sigma=0.02)
    last = {"mixer.out_proj.weight", "ffn.fc2.weight"}
    for name, value in found.items():
        if name.endswith("bias"):
            assert value == 0.0
        elif "norm" not in name:
            sigma = 0.02 / math.sqrt(2 * LAYERS) if name in last else 0.02
            assert value == pytest.approx(sigma, rel=0.05), name


def test_relative_biases_start_small_except_in_torchscale(
    spread: Callable[..., dict[str, float]],
) -> None:
    table = {"rel_pos_buckets": 32, "max_rel_pos": 128}
    assert spread(**table)["relative_position.weight"] == pytest.approx(0.02, rel=0.3)
    found = spread(init="torchscale", **table)
    assert found["relative_position.weight"] == pytest.approx(1.0, rel=0.3)
