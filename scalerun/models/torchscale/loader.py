"""Models with TorchScale's weights. Tensors are handed in; the caller reads files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models import transformer_encoder, transformer_lm, transformer_mlm, transformer_mt
from scalerun.models.encoder_decoder import EncoderDecoder
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
    mlm_config,
)
from scalerun.models.transformer_encoder import TransformerEncoder
from scalerun.models.transformer_lm import TransformerLM
from scalerun.models.transformer_mlm import TransformerMLM
from scalerun.models.translation import Translation, drop_tied
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
        version: which TorchScale trained it: ``main``, ``0.3.0``, or ``0.3.0-override`` where the
            configuration was changed by ``override``, as in TorchScale's examples.
        padding_idx: number of the padding symbol.

    Raises:
        ConfigError: the configuration chooses something that is not there.
        UserError: keys or shapes do not fit the configuration.
    """
    return translate_encoder(given, state, version=version).build(padding_idx)


def load_mlm(
    given: EncoderConfig | Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    version: str,
    padding_idx: int | None = None,
) -> TransformerMLM:
    """An encoder with the head of TorchScale's masked-language-modelling example.

    Arguments and errors as in :func:`load_encoder`.
    """
    return translate_mlm(given, state, version=version).build(padding_idx)


def load_decoder(
    given: DecoderConfig | Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    version: str,
    padding_idx: int | None = None,
) -> TransformerLM:
    """A decoder; arguments and errors as in :func:`load_encoder`."""
    return translate_decoder(given, state, version=version).build(padding_idx)


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
    return translate_encoder_decoder(given, state, version=version).build(padding_idx)


def translate_encoder(
    given: EncoderConfig | Mapping[str, Any], state: Mapping[str, Tensor], *, version: str
) -> Translation:
    """What :func:`load_encoder` builds."""
    given = as_config(EncoderConfig, given, version)
    weights = convert_keys(state)
    if "output_projection.weight" not in weights and not given.share_encoder_input_output_embed:
        given = replace(given, no_output_layer=True)
    cfg = encoder_config(given, version=version, **_positions({"encoder": state}))
    if cfg.share_encoder_input_output_embed:
        drop_tied(weights, "output_projection.weight", "embedding.tokens.weight")
    return Translation(transformer_encoder.MODEL, cfg, weights, _vocab_size(state))


def translate_mlm(
    given: EncoderConfig | Mapping[str, Any], state: Mapping[str, Tensor], *, version: str
) -> Translation:
    """What :func:`load_mlm` builds."""
    given = as_config(EncoderConfig, given, version)
    cfg = mlm_config(given, version=version, **_positions({"encoder": state}))
    weights = convert_keys(state)
    drop_tied(weights, "output_projection.weight", "embedding.tokens.weight")
    return Translation(transformer_mlm.MODEL, cfg, weights, _vocab_size(state))


def translate_decoder(
    given: DecoderConfig | Mapping[str, Any], state: Mapping[str, Tensor], *, version: str
) -> Translation:
    """What :func:`load_decoder` builds."""
    given = as_config(DecoderConfig, given, version)
    if given.multiway:
        state = drop_unused_halves(state)
    cfg = decoder_config(given, version=version, **_positions({"decoder": state}))
    weights = convert_keys(state)
    if cfg.share_decoder_input_output_embed:
        drop_tied(weights, "output_projection.weight", "embedding.tokens.weight")
    return Translation(transformer_lm.MODEL, cfg, weights, _vocab_size(state))


def translate_encoder_decoder(
    given: EncoderDecoderConfig | Mapping[str, Any], state: Mapping[str, Tensor], *, version: str
) -> Translation:
    """What :func:`load_encoder_decoder` builds."""
    given = as_config(EncoderDecoderConfig, given, version)
    sides = {side: without_prefix(state, f"{side}.") for side in ("encoder", "decoder")}
    cfg = encoder_decoder_config(given, version=version, **_positions(sides))
    weights = {
        f"{side}.{key}": tensor
        for side, own in sides.items()
        for key, tensor in convert_keys(own).items()
    }
    embedding = "decoder.embedding.tokens.weight"
    if cfg.decoder_stack().tied_output:
        drop_tied(weights, "decoder.output_projection.weight", embedding)
    shared = weights.get("encoder.embedding.tokens.weight")
    if cfg.share_all_embeddings and not _same(shared, weights.get(embedding)):
        raise UserError(
            "share_all_embeddings is set, but the encoder's and the decoder's embed_tokens.weight "
            "differ"
        )
    source, target = _vocab_size(sides["encoder"]), _vocab_size(sides["decoder"])
    two = None if source == target else source
    return Translation(transformer_mt.MODEL, cfg, weights, target, two)


def _vocab_size(state: Mapping[str, Tensor]) -> int:
    if "embed_tokens.weight" not in state:
        raise UserError("the state dict has no embed_tokens.weight")
    return state["embed_tokens.weight"].shape[0]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


def _positions(sides: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """Settings of the absolute positions that the state dicts have, by side."""
    settings: dict[str, Any] = {}
    kinds = set()
    for side, state in sides.items():
        kind = "sinusoidal_pos" if SINUSOIDAL_KEY in state else "no_token_positional_embeddings"
        for key in ("embed_positions.weight", "embed_positions.A.weight"):
            if key in state:
                which = "source" if side == "encoder" else "target"
                kind = f"{side}_learned_pos"
                settings[f"max_{which}_positions"] = state[key].shape[0] - OFFSET
        kinds.add(kind)
    learned = {kind for kind in kinds if kind.endswith("learned_pos")}
    return settings | dict.fromkeys(learned or kinds, True)
