"""BEiT-3 with TorchScale's weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.beit3 import MODEL, BEiT3
from scalerun.models.torchscale.configs import EncoderConfig, as_config
from scalerun.models.torchscale.keys import convert_keys, without_prefix
from scalerun.models.torchscale.translate import beit3_config
from scalerun.models.translation import Translation
from scalerun.modules.positions.learned import OFFSET

PREFIX = "beit3."
"""Of all keys in the published checkpoints."""
TEXT = "text_embed.weight"
VISION = {
    "vision_embed.cls_token": "vision_embedding.cls_token",
    "vision_embed.mask_token": "vision_embedding.mask_token",
    "vision_embed.proj.weight": "vision_embedding.weight",
    "vision_embed.proj.bias": "vision_embedding.bias",
}
POSITIONS = "encoder.embed_positions.{}.weight"


def load_beit3(
    given: EncoderConfig | Mapping[str, Any],
    state: Mapping[str, Tensor],
    *,
    version: str,
    padding_idx: int | None = None,
) -> BEiT3:
    """A BEiT-3 on the CPU, in float32, with TorchScale's weights.

    Args:
        given: TorchScale's configuration, or what was passed to it. The sizes of images and of the
            position tables are those of the weights.
        state: the model's state dict, its keys with or without the prefix ``beit3.``.
        version: as in :func:`~scalerun.models.torchscale.loader.load_encoder`.
        padding_idx: number of the padding symbol.

    Raises:
        ConfigError: the configuration chooses something that is not there.
        UserError: keys or shapes do not fit the configuration.
    """
    return translate_beit3(given, state, version=version).build(padding_idx)


def translate_beit3(
    given: EncoderConfig | Mapping[str, Any], state: Mapping[str, Tensor], *, version: str
) -> Translation:
    """What :func:`load_beit3` builds."""
    state = {key.removeprefix(PREFIX): tensor for key, tensor in state.items()}
    encoder = without_prefix(state, "encoder.")
    changes: dict[str, Any] = {
        **image_fields(state),
        "no_output_layer": "output_projection.weight" not in encoder,
    }
    given = replace(as_config(EncoderConfig, given, version), **changes)
    cfg = beit3_config(
        given,
        version=version,
        max_source_positions=state[POSITIONS.format("B")].shape[0] - OFFSET,
    )
    weights = convert_keys(encoder) | {ours: state[theirs] for theirs, ours in VISION.items()}
    weights["embedding.tokens.weight"] = state[TEXT]
    foreign = [k for k in state if not (k.startswith("encoder.") or k == TEXT or k in VISION)]
    if foreign:
        raise UserError(f"the state dict has {foreign[0]}, which BEiT-3 does not have")
    return Translation(MODEL, cfg, weights, state[TEXT].shape[0])


def image_fields(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Sizes of images and patches, from the patch projection and the table of positions.

    Raises:
        UserError: keys are missing, or the positions are not those of a square image.
    """
    missing = [key for key in (TEXT, *VISION, *map(POSITIONS.format, "AB")) if key not in state]
    if missing:
        raise UserError(f"the state dict has no {', '.join(missing)}, which BEiT-3 has")
    _, channels, patch_size, _ = state["vision_embed.proj.weight"].shape
    num_patches = state[POSITIONS.format("A")].shape[0] - OFFSET - 1
    side = math.isqrt(max(num_patches, 0))
    if side == 0 or side**2 != num_patches:
        raise UserError(
            f"{POSITIONS.format('A')} has {num_patches} positions beside the class token's, which "
            "is no square image"
        )
    return {"img_size": side * patch_size, "patch_size": patch_size, "in_chans": channels}
