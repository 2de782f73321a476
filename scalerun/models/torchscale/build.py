"""Models from TorchScale's configurations, called by TorchScale's names.

The classes are those that ``--arch`` builds, and are called as it is said there:
:mod:`scalerun.models.transformer_encoder`, :mod:`scalerun.models.transformer_decoder`,
:mod:`scalerun.models.encoder_decoder`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from scalerun.dataclass.errors import ConfigError
from scalerun.models.base_model import BaseModel
from scalerun.models.blocks import TransformerParts
from scalerun.models.stack import Stack
from scalerun.models.torchscale.configs import (
    AttentionFields,
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
)
from scalerun.models.torchscale.translate import (
    decoder_config,
    encoder_config,
    encoder_decoder_config,
    place_norms,
)
from scalerun.models.transformer_encoder import TransformerEncoder
from scalerun.models.transformer_lm import TransformerLM
from scalerun.models.transformer_mt import TransformerMT
from scalerun.modules.init import initialize

POSITIONS = ("none", "learned", "sinusoidal")


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
    ours = encoder_config(cfg)
    parts = _parts(ours, ours.encoder_stack(), cfg, positions, padding_idx)
    with torch.device("meta"):
        model = TransformerEncoder(parts, output_layer=not cfg.no_output_layer)
    return _ready(model, seed)


def Decoder(
    cfg: DecoderConfig, *, positions: str = "none", padding_idx: int | None = None, seed: int = 1
) -> TransformerLM:
    """A decoder with fresh weights; arguments and errors as in :func:`Encoder`."""
    ours = decoder_config(cfg)
    parts = _parts(ours, ours.decoder_stack(), cfg, positions, padding_idx)
    with torch.device("meta"):
        model = TransformerLM(parts)
    return _ready(model, seed)


def EncoderDecoder(
    cfg: EncoderDecoderConfig,
    *,
    positions: str = "none",
    padding_idx: int | None = None,
    seed: int = 1,
) -> TransformerMT:
    """An encoder-decoder with fresh weights; arguments and errors as in :func:`Encoder`."""
    ours = encoder_decoder_config(cfg)
    encoder, decoder = (_parts(ours, stack, cfg, positions, padding_idx) for stack in ours.stacks())
    with torch.device("meta"):
        model = TransformerMT(encoder, decoder, share_embeddings=ours.share_all_embeddings)
    return _ready(model, seed)


def _parts(
    ours: Any, stack: Stack, cfg: AttentionFields, positions: str, padding_idx: int | None
) -> TransformerParts:
    if cfg.vocab_size <= 0:
        raise ConfigError(f"vocab_size is {cfg.vocab_size}; give the number of symbols")
    if positions not in POSITIONS:
        raise ConfigError(f"positions {positions!r} is not one of {', '.join(POSITIONS)}")
    stack = place_norms(stack, cfg, version="0.3.0")
    stack = replace(stack, axes=replace(stack.axes, absolute_position=positions))
    return TransformerParts(ours, stack, vocab_size=cfg.vocab_size, padding_idx=padding_idx)


def _ready(model: Any, seed: int) -> Any:
    assert isinstance(model, BaseModel)
    model.to_empty(device="cpu")
    initialize(model, seed)
    return model
