"""Flat parameters, of which each data-parallel rank stored a piece, and what they are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.metaseq.files import METADATA, MetaseqFile


@dataclass(frozen=True)
class FlatParameter:
    """One entry of the metadata of a file."""

    key: str
    """In the state dict."""
    names: list[str]
    """The weights that lie in it one after the other."""
    shapes: list[tuple[int, ...]]
    padding: int
    """Numbers at the end of this rank's piece that mean nothing."""


def whole_state(files: Sequence[MetaseqFile]) -> dict[str, Tensor]:
    """The weights of all data-parallel ranks together, by their own names.

    Args:
        files: of one tensor rank.

    Raises:
        UserError: a piece is missing or of another length than the metadata says.
    """
    first = files[0]
    if first.metadata is None and len(files) == 1:
        return dict(first.state)
    flat = [list(flat_parameters(file)) for file in files]
    shared, buffers = _shared_names(first), _buffer_names(first)
    state = {name: first.state[name] for name in buffers if name in first.state}
    for i, parameter in enumerate(flat[0]):
        pieces = [
            _piece(file, own, i, parameter.key) for file, own in zip(files, flat, strict=True)
        ]
        whole = torch.cat(pieces)
        sizes = [math.prod(shape) for shape in parameter.shapes]
        if sum(sizes) != len(whole):
            raise UserError(
                f"{first.path} and its {len(files) - 1} neighbours have {len(whole)} numbers of "
                f"{parameter.key}, and its weights need {sum(sizes)}; files are missing"
            )
        parts = whole.split(sizes)
        for name, shape, part in zip(parameter.names, parameter.shapes, parts, strict=True):
            state[name] = part.view(shape)
    for original, copy in shared:
        state[copy] = state[original]
    return state


def flat_parameters(file: MetaseqFile) -> Iterator[FlatParameter]:
    """What the metadata of a file says.

    Raises:
        UserError: there is none, or it has another form.
    """
    try:
        for module in file.metadata["param_metadata"]:
            prefix = f"{module['fsdp_path']}." if module["fsdp_path"] else ""
            for name, entry in module["params"].items():
                shapes = [tuple(int(size) for size in shape) for shape in entry["shapes"]]
                names = [f"{prefix}{each}" for each in entry["names"]]
                if len(names) != len(shapes):
                    raise ValueError(f"{len(names)} names and {len(shapes)} shapes")
                yield FlatParameter(f"{prefix}{name}", names, shapes, int(entry["padding"]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{file.path} does not say how its flat parameters were made ({METADATA}: "
            f"{type(error).__name__} {error})"
        ) from error


def _piece(file: MetaseqFile, own: Sequence[FlatParameter], index: int, key: str) -> Tensor:
    """A rank's piece without its padding."""
    if index >= len(own) or own[index].key != key or key not in file.state:
        raise UserError(f"{file.path} has no {key}, which the first file has")
    tensor, padding = file.state[key].flatten(), own[index].padding
    if not 0 <= padding <= len(tensor):
        raise UserError(
            f"{file.path} has {len(tensor)} numbers of {key}, {padding} of them padding"
        )
    return tensor[: len(tensor) - padding]


def _shared_names(file: MetaseqFile) -> list[tuple[str, str]]:
    """(original, copy) of weights that are one."""
    modules: Sequence[Mapping[str, Any]] = file.metadata["param_metadata"]
    return [(str(a), str(b)) for module in modules for a, b in module.get("shared_param_info", ())]


def _buffer_names(file: MetaseqFile) -> list[str]:
    return [str(name) for name in file.metadata.get("buffer_names", ())]
