from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from scalerun.models.base_model import build_model
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_decoder import TransformerDecoder

VOCAB = 19


@pytest.fixture
def make_config() -> Callable[..., TransformerConfig]:
    """A small configuration with some settings changed."""

    def make(**changes: Any) -> TransformerConfig:
        small: dict[str, Any] = {
            "decoder_embed_dim": 16,
            "decoder_attention_heads": 2,
            "decoder_ffn_embed_dim": 24,
            "decoder_layers": 3,
            "max_target_positions": 32,
        }
        return TransformerConfig(**{**small, **changes})

    return make


@pytest.fixture
def make_model(
    make_config: Callable[..., TransformerConfig],
) -> Callable[..., TransformerDecoder]:
    """A small decoder over 19 symbols, of which 1 is padding, with every parameter in use."""

    def make(*, seed: int = 1, **changes: Any) -> TransformerDecoder:
        model = build_model(
            make_config(**changes),
            vocab_size=VOCAB,
            padding_idx=1,
            seed=seed,
            device=torch.device("cpu"),
        )
        assert isinstance(model, TransformerDecoder)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        return model

    return make


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
