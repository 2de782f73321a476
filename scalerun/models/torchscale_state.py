"""Whether TorchScale's weights, under our names, are those of a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError


def drop_tied(weights: dict[str, Tensor]) -> None:
    """Take the output projection out of the weights of a model that uses its embedding for it.

    Raises:
        UserError: the two differ.
    """
    tied = weights.pop("output_projection.weight", None)
    if tied is not None and not torch.equal(tied, weights["embedding.tokens.weight"]):
        raise UserError(
            "share_decoder_input_output_embed is set, but output_projection.weight differs from "
            "embed_tokens.weight"
        )


def check_fit(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Compare names and shapes of the weights that a model has and of those that were found.

    Raises:
        UserError: they differ.
    """
    missing, surplus = (
        sorted(expected.keys() - found.keys()),
        sorted(found.keys() - expected.keys()),
    )
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
