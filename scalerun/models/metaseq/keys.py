"""Metaseq's settings and keys as those of OPT, and how tensor ranks divided its weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError

logger = logging.getLogger(__name__)

State = Mapping[str, Tensor]
SAME = {
    "decoder_attention_heads": "num_attention_heads",
    "activation_fn": "activation_function",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
}
"""Metaseq's setting -> OPT's field of the same meaning. Sizes are taken from the weights."""
DEFAULTS = {"activation_fn": "relu", "dropout": 0.1, "attention_dropout": 0.0}
ONLY = {
    "no_scale_embedding": True,
    "decoder_learned_pos": True,
    "decoder_learned_sinusoidal": False,
    "alibi": False,
    "self_attn_doc_sep": -1,
    "disable_bias": False,
    "disable_affine_ln": False,
}
"""Settings that can be converted with one value alone."""
DIVIDED = {
    r"decoder\.embed_tokens\.weight": 0,
    r"decoder\.layers\.\d+\.self_attn\.[qkv]_proj\.(weight|bias)": 0,
    r"decoder\.layers\.\d+\.fc1\.(weight|bias)": 0,
    r"decoder\.layers\.\d+\.fc2\.weight": 1,
    r"decoder\.layers\.\d+\.self_attn\.out_proj\.weight": 1,
}
"""Weights of which each tensor rank has a part, and the dimension they are cut in."""
OUTPUT, EMBEDDING = "decoder.output_projection.weight", "decoder.embed_tokens.weight"
POSITIONS = "decoder.embed_positions.weight"
JOINED, ORDER = "qkv_proj", "kvq"
"""One projection for three, and the order of its thirds."""
NO_WEIGHTS = r"decoder\.version|decoder\.embed_positions\._float_tensor"
RENAMED = {
    "decoder.layer_norm.": "decoder.final_layer_norm.",
    "decoder.output_projection.": "lm_head.",
}
UNEQUAL = 1e-6
OFFSET = 2


def separated(state: State) -> dict[str, Tensor]:
    """Keys of weights alone, with a projection each for queries, keys and values."""
    found: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if re.fullmatch(NO_WEIGHTS, key):
            continue
        if f".{JOINED}." not in key:
            found[key] = tensor
            continue
        for letter, third in zip(ORDER, tensor.chunk(3), strict=True):
            found[key.replace(JOINED, f"{letter}_proj")] = third
    return found


def joined_parts(parts: Sequence[State]) -> dict[str, Tensor]:
    """The weights of all tensor ranks together.

    Args:
        parts: what :func:`separated` gives for each rank.

    Raises:
        UserError: a rank lacks a weight.
    """
    if len(parts) == 1:
        return dict(parts[0])
    whole: dict[str, Tensor] = {}
    for key in parts[0]:
        missing = [rank for rank, part in enumerate(parts) if key not in part]
        if missing:
            raise UserError(f"the file of tensor rank {missing[0]} has no {key}, which rank 0 has")
        tensors = [part[key] for part in parts]
        dim = _cut_dimension(key, parts[0])
        if dim is not None:
            whole[key] = torch.cat(tensors, dim)
            continue
        _compare(key, tensors)
        whole[key] = tensors[0]
    return whole


def _cut_dimension(key: str, part: State) -> int | None:
    if key == OUTPUT:  # it is cut where it is the embedding
        return 0 if part[OUTPUT].shape == part[EMBEDDING].shape else None
    return next((dim for pattern, dim in DIVIDED.items() if re.fullmatch(pattern, key)), None)


def _compare(key: str, copies: Sequence[Tensor]) -> None:
    for rank, copy in enumerate(copies[1:], start=1):
        if copy.shape != copies[0].shape:
            raise UserError(f"tensor ranks 0 and {rank} have {key} in different shapes")
        difference = float((copy - copies[0]).abs().max())
        if difference > UNEQUAL:
            logger.warning(
                "tensor ranks 0 and %d differ in %s by up to %.2g; that of rank 0 is taken",
                rank,
                key,
                difference,
            )


def opt_state(state: State) -> dict[str, Tensor]:
    """The same weights under OPT's keys."""
    found: dict[str, Tensor] = {}
    for key, tensor in state.items():
        for theirs, ours in RENAMED.items():
            key = key.replace(theirs, ours) if key.startswith(theirs) else key
        found[f"model.{key}" if key.startswith("decoder.") else key] = tensor
    return found


def opt_config(record: Mapping[str, Any], state: State, name: str) -> dict[str, Any]:
    """OPT's fields.

    Args:
        record: metaseq's settings of the model.
        state: what :func:`joined_parts` gives.
        name: where the settings come from, for messages.

    Raises:
        UserError: a setting is missing or has no form here, or there are no such weights.
    """
    for key, value in ONLY.items():
        if record.get(key, value) != value:
            raise UserError(
                f"{name} has {key} {record[key]!r}, which has no form here; only {value!r} does"
            )
    if "decoder_attention_heads" not in record:
        raise UserError(
            f"{name} has no decoder_attention_heads, which the weights do not say; name it in a "
            "YAML or JSON file for --metaseq-config, with activation_fn where that is not relu"
        )
    given = DEFAULTS | dict(record)
    fc1 = "decoder.layers.0.fc1.weight"
    for key in (EMBEDDING, POSITIONS, fc1):
        if key not in state or state[key].dim() != 2:
            raise UserError(f"the checkpoint has no matrix {key}, so it is no OPT model")
    layers = {int(m[1]) for key in state if (m := re.match(r"decoder\.layers\.(\d+)\.", key))}
    output = state.get(OUTPUT)
    tied = output is None or torch.equal(output, state[EMBEDDING])
    return {theirs: given[ours] for ours, theirs in SAME.items()} | {
        "vocab_size": state[EMBEDDING].shape[0],
        "hidden_size": state[EMBEDDING].shape[1],
        "ffn_dim": state[fc1].shape[0],
        "num_hidden_layers": max(layers) + 1,
        "max_position_embeddings": state[POSITIONS].shape[0] - OFFSET,
        "tie_word_embeddings": tied,
    }
