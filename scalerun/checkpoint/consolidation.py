"""The weights of a checkpoint as one list of tensors, read when they are written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from scalerun.checkpoint.safetensors_file import Entry
from scalerun.checkpoint.storage import StoredTensors, template
from scalerun.dataclass.errors import UserError

MODEL, EMA = "model", "ema"


def weight_entries(
    folder: Path,
    *,
    part: str = MODEL,
    dtype: torch.dtype | None = None,
    ties: Mapping[str, str] | None = None,
) -> list[Entry]:
    """The model's tensors by the names they have in it.

    Args:
        folder: a checkpoint, verified.
        part: :data:`EMA` takes the averaged weights; what is not averaged is as in the model.
        dtype: format that floating-point numbers get; None leaves each as it is stored.
        ties: copy -> original, of tensors that a model uses twice; only the original is listed.

    Raises:
        UserError: there are no averaged weights, or a copy differs from its original.
    """
    stored = StoredTensors(folder)
    model, averaged = stored.templates(MODEL), stored.templates(EMA)
    if part == EMA and not averaged:
        raise UserError(
            f"checkpoint {folder} has no averaged weights: the run had no --store-ema; leave "
            "--part ema out"
        )
    _check_ties(stored, model, ties or {})
    entries = []
    for name, saved in model.items():
        if name in (ties or {}):
            continue
        source = EMA if part == EMA and name in averaged else MODEL
        if source == EMA:
            saved = averaged[name]
        wanted = dtype if dtype is not None and saved.is_floating_point() else saved.dtype
        reading = _Reading(stored, f"{source}.{name}", wanted)
        entries.append(Entry(name, template(saved.shape, wanted), reading))
    return entries


class _Reading:
    """Reads one tensor in a number format."""

    def __init__(self, stored: StoredTensors, name: str, dtype: torch.dtype) -> None:
        self.stored = stored
        self.name = name
        self.dtype = dtype

    def __call__(self) -> Tensor:
        tensor = self.stored.read(self.name)
        if tensor.dtype == self.dtype:
            return tensor
        converted = tensor.to(self.dtype)
        if converted.isinf().any() and not tensor.isinf().any():
            raise UserError(
                f"{self.name} has numbers up to {tensor.abs().max():g}, which are too large for "
                f"{str(self.dtype).removeprefix('torch.')}; give --dtype bfloat16 or float32"
            )
        return converted


def _check_ties(
    stored: StoredTensors, model: Mapping[str, Tensor], ties: Mapping[str, str]
) -> None:
    for copy, original in ties.items():
        if copy in model:
            tensors = [stored.read(f"{MODEL}.{name}") for name in (copy, original)]
            if not torch.equal(*tensors):
                raise UserError(
                    f"the settings of the checkpoint say that {copy} is {original}, but its "
                    "tensors differ"
                )
