"""Files that others saved weights in, read without executing anything that they hold."""

from __future__ import annotations

import argparse
import pickle
import struct
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError

SAFETENSORS = ".safetensors"
WEIGHTS = "model"
"""Where fairseq keeps the weights in a checkpoint."""
FLAG = "--allow-namespace"
REMEDY = "save the weights alone, torch.save(model.state_dict(), FILE), and name their settings"
UNREADABLE = (
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What reading a damaged file may raise: its bytes are instructions, which then mean anything."""


@dataclass(frozen=True)
class WeightFile:
    """What a file holds."""

    state: dict[str, Tensor]
    record: dict[str, Any] | None
    """The model's settings that fairseq saved beside the weights; None where there are none."""


def read_weight_file(path: Path, *, allow_namespace: bool = False) -> WeightFile:
    """Read a state dict, or the weights and the model's settings of a fairseq checkpoint.

    Args:
        path: a ``.safetensors`` file, or one that ``torch.save`` wrote.
        allow_namespace: also build ``argparse.Namespace`` objects, in which old versions of fairseq
            kept settings. They are filled with plain values; no code of the file is run.

    Raises:
        UserError: the file cannot be read, or it holds anything beside tensors and plain values.
    """
    content = read_content(path, allow_namespace=allow_namespace)
    weights = content.get(WEIGHTS)
    if isinstance(weights, Mapping):
        return WeightFile(float_tensors(path, weights), record_of(content))
    return WeightFile(float_tensors(path, content), None)


def read_content(path: Path, *, allow_namespace: bool = False) -> Mapping[Any, Any]:
    """Whatever a file holds by name; arguments and errors as in :func:`read_weight_file`."""
    if not path.is_file():
        what = "is a folder; give a file" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {what}")
    if path.suffix == SAFETENSORS:
        return _read_safetensors(path)
    content = _read_torch(path, allow_namespace=allow_namespace)
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__} and no state dict; {REMEDY}")
    return content


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise UserError(
            f"{path} needs the package safetensors; install it, or give a file of torch.save"
        ) from error
    try:
        return load_file(path)
    except (SafetensorError, *UNREADABLE) as error:
        raise damaged(path, f"it cannot be read as safetensors ({_words(error)})") from error


def _read_torch(path: Path, *, allow_namespace: bool) -> Any:
    """What ``torch.save`` wrote; tensors are mapped into memory and read when they are needed."""
    is_archive = zipfile.is_zipfile(path)
    if is_archive:
        _check_sums(path)
        _refuse_code(path, allow_namespace=allow_namespace)
    allowed: AbstractContextManager[object] = nullcontext()
    if allow_namespace:
        allowed = torch.serialization.safe_globals([argparse.Namespace])
    try:
        with allowed:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except UNREADABLE as error:
        hint = "" if is_archive or allow_namespace else f" (old fairseq files need {FLAG})"
        raise damaged(
            path, f"it is cut off, or holds more than tensors and plain values{hint}; {REMEDY}"
        ) from error


def damaged(path: Path, reason: str) -> UserError:
    """The error for a file that cannot be read, whatever stands in it."""
    return UserError(f"{path} is damaged or no weight file: {reason}")


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _check_sums(path: Path) -> None:
    """Compare each part of an archive with its checksum, which torch does not look at.

    Raises:
        UserError: a part differs.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except UNREADABLE as error:
        raise damaged(path, _words(error)) from error
    if wrong is not None:
        raise damaged(path, f"the checksum of its part {wrong} is wrong")


def _refuse_code(path: Path, *, allow_namespace: bool) -> None:
    """Name the classes that a file would have to be trusted with.

    Raises:
        UserError: there are some.
    """
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except UNREADABLE as error:
        raise damaged(path, "torch.save did not write it") from error
    namespace = f"{argparse.Namespace.__module__}.{argparse.Namespace.__qualname__}"
    if namespace in found:
        if not allow_namespace:
            raise UserError(
                f"{path} holds an argparse.Namespace, as old fairseq checkpoints do; give "
                f"{FLAG} to read it as plain values"
            )
        found = [name for name in found if name != namespace]
    if found:
        raise UserError(
            f"{path} names {_listed(found)}; objects of foreign classes are not loaded; {REMEDY}"
        )


def float_tensors(path: Path, content: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The weights of a file.

    Raises:
        UserError: it holds nothing, or anything but tensors of floating-point numbers.
    """
    for key, value in content.items():
        if not isinstance(value, Tensor):
            raise UserError(
                f"{path} is no state dict: {key!r} is of type {type(value).__name__}; {REMEDY}"
            )
        if not value.is_floating_point():
            raise UserError(
                f"{path} has {key} in {str(value.dtype).removeprefix('torch.')}; give weights in "
                "floating point"
            )
    if not content:
        raise UserError(f"{path} holds no weights")
    return {str(key): value for key, value in content.items()}


def refuse_not_finite(path: Path, state: Mapping[str, Tensor]) -> None:
    """Refuse weights that nothing can be computed with.

    Raises:
        UserError: names the first that has an infinite value or NaN.
    """
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{path} holds values that are not finite: {name}")


def record_of(content: Mapping[Any, Any]) -> dict[str, Any] | None:
    """The model's settings: ``cfg.model``, or ``args`` in older files."""
    cfg = content.get("cfg")
    found = cfg.get("model") if isinstance(cfg, Mapping) else None
    found = content.get("args") if found is None else found
    if isinstance(found, argparse.Namespace):
        found = vars(found)
    return {str(k): v for k, v in found.items()} if isinstance(found, Mapping) else None


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
