"""The way back: a scalerun model's weights under TorchScale's names, and its configuration.

Only where :mod:`~scalerun.models.torchscale.loader` makes the same model of them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.models.base_model import Architecture
from scalerun.models.renames import Renames
from scalerun.models.retnet import RetNetConfig as OurRetNetConfig
from scalerun.models.torchscale import keys, retnet
from scalerun.models.torchscale.configs import DecoderConfig, SharedConfig
from scalerun.models.torchscale.moe import MOE, expert_keys
from scalerun.models.torchscale.retnet import RetNetConfig, retnet_config
from scalerun.models.torchscale.translate import DECODER, LISTS, SHARED, decoder_config
from scalerun.models.transformer_config import TransformerConfig
from scalerun.modules.positions.xpos import pair_scales

POSITIONS = ("decoder_learned_pos", "sinusoidal_pos", "no_token_positional_embeddings")
"""Settings of what TorchScale takes as modules: the keys of a state dict tell them."""
EMBEDDING, OUTPUT = "embedding.tokens.weight", "output_projection.weight"
NOT_OF_THE_MODEL = ("checkpoint_activations",)


@dataclass(frozen=True)
class Piece:
    """One tensor of TorchScale's state dict."""

    key: str
    source: str
    """Our name of the tensor that it is, or is a part of."""
    expert: int | None = None
    """Which of the stacked experts it is."""


def torchscale_fields(cfg: ScalerunDataclass) -> tuple[dict[str, Any], str]:
    """TorchScale's fields for a model, and the version of TorchScale that reads them so.

    Args:
        cfg: a decoder's settings, or a RetNet's.

    Raises:
        UserError: TorchScale has no such model; names the first setting it has no form for.
    """
    fields_of, config_class, settings_of = _kind(cfg)
    given = fields_of(cfg)
    saved = {name: value for name, value in cfg.to_dict().items() if name != "_name"}
    reasons = []
    for version in ("main", "0.3.0"):
        if version == "0.3.0" and given.get("segment_length"):
            continue
        theirs = settings_of(config_class.from_fields(given), version)
        differing = Architecture(theirs).differences({"settings": saved})
        if not differing:
            return given, version
        reasons.append(differing[0][0])
    raise UserError(f"the model has {reasons[0]}, which TorchScale has no form for")


def torchscale_pieces(cfg: ScalerunDataclass, weights: Mapping[str, Tensor]) -> list[Piece]:
    """What TorchScale's state dict takes from a model's tensors, its experts one by one.

    Args:
        cfg: settings that :func:`torchscale_fields` takes.
        weights: by our names; only shapes are looked at.

    Raises:
        UserError: a tensor has no place in TorchScale's state dict.
    """
    renames = _renames(cfg)
    pieces = []
    for name, tensor in weights.items():
        experts = expert_keys(name, tensor.shape[0]) if tensor.dim() else None
        if experts is not None:
            pieces += [Piece(key, name, number) for number, key in enumerate(experts)]
            continue
        key = renames.theirs(name)
        if key is None:
            raise UserError(f"the model has {name}, which TorchScale has no name for")
        pieces.append(Piece(key, name))
    if OUTPUT not in weights:  # TorchScale lists a tied table twice
        pieces.append(Piece(OUTPUT, EMBEDDING))
    return pieces


def torchscale_tables(cfg: ScalerunDataclass) -> dict[str, Tensor]:
    """What TorchScale stores beside the weights: numbers that we compute."""
    if isinstance(cfg, OurRetNetConfig):
        heads = cfg.decoder_retention_heads
        sizes = {"angle": cfg.decoder_embed_dim // heads, "decay": heads}
        return {key: table(sizes[key.rpartition(".")[2]]) for key, table in retnet.TABLES.items()}
    assert isinstance(cfg, TransformerConfig)
    stack = cfg.decoder_stack()
    tables = {}
    if stack.axes.absolute_position == "sinusoidal":
        tables[keys.SINUSOIDAL_KEY] = torch.zeros(1)
    if stack.axes.relative_position == "xpos":
        for layer in range(stack.num_layers):
            tables[f"layers.{layer}.self_attn.xpos.scale"] = pair_scales(stack.head_dim)
    return tables


SettingsOf = Callable[[Any, str], ScalerunDataclass]


def _kind(
    cfg: ScalerunDataclass,
) -> tuple[Callable[[Any], dict[str, Any]], type[SharedConfig], SettingsOf]:
    """How a model's fields are found, whose they are, and how they are read again."""
    if type(cfg) is TransformerConfig:
        positions = {name: getattr(cfg, name) for name in POSITIONS}
        return (
            _decoder_fields,
            DecoderConfig,
            lambda given, version: decoder_config(given, version=version, **positions),
        )
    if type(cfg) is OurRetNetConfig:
        return (
            _retnet_fields,
            RetNetConfig,
            lambda given, version: retnet_config(given, version=version),
        )
    raise UserError(
        f"a model of --arch {cfg._name} cannot be converted to TorchScale; decoders, LongNets and "
        "RetNets can"
    )


def _renames(cfg: ScalerunDataclass) -> Renames:
    return retnet.RENAMES if isinstance(cfg, OurRetNetConfig) else keys.RENAMES


def _decoder_fields(cfg: TransformerConfig) -> dict[str, Any]:
    found = _fields(cfg, SHARED + DECODER)
    return found | {name: found[name] or None for name in LISTS}


def _retnet_fields(cfg: OurRetNetConfig) -> dict[str, Any]:
    found = _fields(cfg, retnet.SAME)
    if cfg.chunkwise_recurrent:
        found["recurrent_chunk_size"] = cfg.recurrent_chunk_size
    return found


def _fields(cfg: Any, same: tuple[str, ...]) -> dict[str, Any]:
    """What decoders and RetNets have in common, and the fields that mean the same here."""
    resolved = cfg.resolved()
    found = {name: getattr(cfg, name) for name in same if name not in NOT_OF_THE_MODEL}
    found["decoder_normalize_before"] = resolved.decoder_normalize_before
    found["subln"] = cfg.subln
    if "attention_dropout" in found:
        found["bert_init"] = cfg.init == "bert"
    if cfg.moe_freq:
        found |= {name: getattr(resolved, name) for name in MOE if hasattr(resolved, name)}
        found["use_xmoe"] = resolved.moe_gate == "xmoe"
    return found
