"""Models with TorchScale's weights. Tensors are handed in; the caller reads files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.blocks import TransformerParts
from scalerun.models.encoder_decoder import EncoderDecoder
from scalerun.models.stack import Stack
from scalerun.models.torchscale.configs import (
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    as_config,
)
from scalerun.models.torchscale.keys import (
    SINUSOIDAL_KEY,
    convert_keys,
    drop_unused_halves,
    without_prefix,
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
from scalerun.modules.positions.learned import OFFSET


def load_encoder(
    given: EncoderConfig | Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    version: str,
    padding_idx: int | None = None,
) -> TransformerEncoder:
    """An encoder on the CPU, in float32, with TorchScale's weights.

    Args:
        given: TorchScale's configuration, or what was passed to it.
        state: the encoder's state dict, its keys without prefix.
        version: which TorchScale trained it: ``main`` or ``0.3.0``.
        padding_idx: number of the padding symbol.

    Raises:
        ConfigError: the configuration chooses something that is not there.
        UserError: keys or shapes do not fit the configuration.
    """
    given = as_config(EncoderConfig, given, version)
    cfg = encoder_config(given)
    stack = _fitted(place_norms(cfg.encoder_stack(), given, version=version), state)
    weights = convert_keys(state)
    if stack.tied_output:
        drop_tied(weights, "output_projection.weight", "embedding.tokens.weight")
    parts = TransformerParts(cfg, stack, vocab_size=_vocab_size(state), padding_idx=padding_idx)
    output_layer = stack.tied_output or "output_projection.weight" in weights
    with torch.device("meta"):
        model = TransformerEncoder(parts, output_layer=output_layer)
    return fill(model, weights)


def load_decoder(
    given: DecoderConfig | Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    version: str,
    padding_idx: int | None = None,
) -> TransformerLM:
    """A decoder; arguments and errors as in :func:`load_encoder`."""
    given = as_config(DecoderConfig, given, version)
    cfg = decoder_config(given)
    if given.multiway:
        state = drop_unused_halves(state)
    stack = _fitted(place_norms(cfg.decoder_stack(), given, version=version), state)
    weights = convert_keys(state)
    if stack.tied_output:
        drop_tied(weights, "output_projection.weight", "embedding.tokens.weight")
    parts = TransformerParts(cfg, stack, vocab_size=_vocab_size(state), padding_idx=padding_idx)
    with torch.device("meta"):
        model = TransformerLM(parts)
    return fill(model, weights)


def load_encoder_decoder(
    given: EncoderDecoderConfig | Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    version: str,
    padding_idx: int | None = None,
) -> EncoderDecoder:
    """An encoder-decoder; arguments and errors as in :func:`load_encoder`.

    Args:
        state: its keys begin with ``encoder.`` or ``decoder.``.
    """
    given = as_config(EncoderDecoderConfig, given, version)
    cfg = encoder_decoder_config(given)
    parts, weights = [], {}
    for stack in cfg.stacks():
        prefix = f"{stack.side}."
        own = without_prefix(state, prefix)
        stack = _fitted(place_norms(stack, given, version=version), own)
        parts.append(
            TransformerParts(cfg, stack, vocab_size=_vocab_size(own), padding_idx=padding_idx)
        )
        weights.update({prefix + key: tensor for key, tensor in convert_keys(own).items()})
    embedding = "decoder.embedding.tokens.weight"
    if parts[1].stack.tied_output:
        drop_tied(weights, "decoder.output_projection.weight", embedding)
    shared = weights["encoder.embedding.tokens.weight"]
    if cfg.share_all_embeddings and not torch.equal(weights[embedding], shared):
        raise UserError(
            "share_all_embeddings is set, but the encoder's and the decoder's embed_tokens.weight "
            "differ"
        )
    with torch.device("meta"):
        model = TransformerMT(*parts, share_embeddings=cfg.share_all_embeddings)
    return fill(model, weights)


def fill(model: Any, weights: Mapping[str, Tensor]) -> Any:
    """A model made without memory, on the CPU, in float32, with these weights.

    Raises:
        UserError: names or shapes differ from the model's.
    """
    model.to_empty(device="cpu")
    _check_fit(model.state_dict(), weights)
    model.load_state_dict(weights)
    for module in model.modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()
    return model


def drop_tied(weights: dict[str, Tensor], copy: str, original: str) -> None:
    """Remove a tensor that the configuration ties to another.

    Raises:
        UserError: they differ.
    """
    tied = weights.pop(copy, None)
    if tied is not None and not torch.equal(tied, weights[original]):
        raise UserError(f"the configuration ties {copy} to {original}, but they differ")


def _vocab_size(state: Mapping[str, Tensor]) -> int:
    if "embed_tokens.weight" not in state:
        raise UserError("the state dict has no embed_tokens.weight")
    return state["embed_tokens.weight"].shape[0]


def _fitted(stack: Stack, state: Mapping[str, Tensor]) -> Stack:
    """The stack with the absolute positions that the state dict has."""
    positions = "sinusoidal" if SINUSOIDAL_KEY in state else "none"
    for key in ("embed_positions.weight", "embed_positions.A.weight"):
        if key in state:
            positions = "learned"
            stack = replace(stack, max_positions=state[key].shape[0] - OFFSET)
    return replace(stack, axes=replace(stack.axes, absolute_position=positions))


def _check_fit(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    missing = sorted(expected.keys() - found.keys())
    surplus = sorted(found.keys() - expected.keys())
    if missing or surplus:
        raise UserError(
            f"the state dict does not fit the configuration: it lacks {missing} and has {surplus} "
            "too much (names as in scalerun)"
        )
    for name, tensor in expected.items():
        if tensor.shape != found[name].shape:
            raise UserError(
                f"the state dict does not fit the configuration: {name} is "
                f"{tuple(found[name].shape)} and should be {tuple(tensor.shape)}"
            )
