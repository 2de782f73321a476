"""Models from TorchScale's configurations, called by TorchScale's names.

The classes are those that ``--arch`` builds, and are called as it is said there:
:mod:`scalerun.models.transformer_encoder`, :mod:`scalerun.models.transformer_decoder`,
:mod:`scalerun.models.encoder_decoder`.
"""

from __future__ import annotations

from typing import Any

import torch

from scalerun.dataclass.errors import ConfigError
from scalerun.models.base_model import BaseModel
from scalerun.models.torchscale.configs import (
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
)
from scalerun.models.torchscale.translate import (
    decoder_config,
    encoder_config,
    encoder_decoder_config,
)
from scalerun.models.transformer_encoder import TransformerEncoder
from scalerun.models.transformer_lm import TransformerLM
from scalerun.models.transformer_mt import TransformerMT
from scalerun.modules.init import initialize

POSITIONS = ("none", "learned", "sinusoidal")
VERSION = "0.3.0"
"""DeepNorm and SubLN place the norms of both sides, as their papers say."""


def Encoder(
    cfg: EncoderConfig, *, positions: str = "none", padding_idx: int | None = None, seed: int = 1
) -> TransformerEncoder:
    """An encoder with fresh weights, drawn as TorchScale draws them.

    Args:
        cfg: TorchScale's configuration; ``vocab_size`` has to be set.
        positions: absolute positions: ``none``, ``learned`` or ``sinusoidal``. TorchScale takes a
            module in their place.
        padding_idx: number of the padding symbol.
        seed: decides all weights.

    Raises:
        ConfigError: a setting is out of range or has no form here.
    """
    ours = encoder_config(cfg, version=VERSION, **_positions(positions, "encoder"))
    return _build(TransformerEncoder, ours, cfg.vocab_size, padding_idx, seed)


def Decoder(
    cfg: DecoderConfig, *, positions: str = "none", padding_idx: int | None = None, seed: int = 1
) -> TransformerLM:
    """A decoder with fresh weights; arguments and errors as in :func:`Encoder`."""
    ours = decoder_config(cfg, version=VERSION, **_positions(positions, "decoder"))
    return _build(TransformerLM, ours, cfg.vocab_size, padding_idx, seed)


def EncoderDecoder(
    cfg: EncoderDecoderConfig,
    *,
    positions: str = "none",
    padding_idx: int | None = None,
    seed: int = 1,
) -> TransformerMT:
    """An encoder-decoder with fresh weights; arguments and errors as in :func:`Encoder`."""
    ours = encoder_decoder_config(
        cfg, version=VERSION, **_positions(positions, "encoder", "decoder")
    )
    return _build(TransformerMT, ours, cfg.vocab_size, padding_idx, seed)


def _build(
    kind: type[BaseModel], ours: Any, vocab_size: int, padding_idx: int | None, seed: int
) -> Any:
    if vocab_size <= 0:
        raise ConfigError(f"vocab_size is {vocab_size}; give the number of symbols")
    with torch.device("meta"):
        model = kind.build_model(ours, vocab_size=vocab_size, padding_idx=padding_idx)
    model.to_empty(device="cpu")
    initialize(model, seed)
    return model


def _positions(kind: str, *sides: str) -> dict[str, bool]:
    """The settings that give every side these absolute positions."""
    if kind not in POSITIONS:
        raise ConfigError(f"positions {kind!r} is not one of {', '.join(POSITIONS)}")
    if kind == "learned":
        return {f"{side}_learned_pos": True for side in sides}
    return {"sinusoidal_pos" if kind == "sinusoidal" else "no_token_positional_embeddings": True}
