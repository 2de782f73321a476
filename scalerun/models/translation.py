"""A model of another library, in scalerun's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.models.base_model import MODEL_REGISTRY


@dataclass(frozen=True)
class Translation:
    """Settings and weights under our names."""

    arch: str
    """The name that ``--arch`` knows the model by."""
    cfg: ScalerunDataclass
    weights: Mapping[str, Tensor]
    vocab_size: int
    source_vocab_size: int | None = None
    """Where an encoder-decoder has two vocabularies."""

    def template(self, padding_idx: int | None = None) -> Any:
        """The model, as shapes alone."""
        source = self.source_vocab_size
        two: dict[str, Any] = {} if source is None else {"source_vocab_size": source}
        with torch.device("meta"):
            return MODEL_REGISTRY.get(self.arch).cls.build_model(
                self.cfg, vocab_size=self.vocab_size, padding_idx=padding_idx, **two
            )

    def build(self, padding_idx: int | None = None) -> Any:
        """The model, on the CPU, in float32.

        Raises:
            UserError: names or shapes of the weights do not fit the settings.
        """
        return fill(self.template(padding_idx), self.weights)


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
