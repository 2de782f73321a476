"""What a checkpoint holds, and whether it is what was written; tensors are not loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scalerun.checkpoint.checkpoint_folder import BEST, LAST, CheckpointFolder, read_pointer
from scalerun.checkpoint.manifest import DamagedCheckpoint, Manifest, read_manifest, verify
from scalerun.checkpoint.reader import find_checkpoint, is_checkpoint, read_state
from scalerun.checkpoint.storage import StoredTensors
from scalerun.dataclass.errors import UserError


@dataclass(frozen=True)
class TensorFacts:
    """One stored tensor."""

    name: str
    """Within its part."""
    shape: torch.Size
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Inspection:
    """One checkpoint."""

    path: Path
    manifest: Manifest
    parts: list[str]
    """All of them, also those without tensors."""
    tensors: dict[str, list[TensorFacts]]
    """By part."""
    epoch: int | None
    """The epoch (from 1) that its place in the data belongs to; None where it has no place."""


def inspect_checkpoint(path: str | Path) -> Inspection:
    """Describe a checkpoint from its index; names and sizes of its files are checked.

    Args:
        path: as for :func:`~scalerun.checkpoint.reader.find_checkpoint`.

    Raises:
        UserError: there is none, files are missing, or it cannot be read.
    """
    folder = find_checkpoint(path, "PATH", checksums=False)
    manifest = read_manifest(folder)
    state = _state(folder)
    stored = StoredTensors(folder)
    tensors = {
        part: [TensorFacts(name, t.shape, t.dtype) for name, t in stored.templates(part).items()]
        for part in stored.parts()
    }
    return Inspection(
        path=folder,
        manifest=manifest,
        parts=list(state),
        tensors=tensors,
        epoch=manifest.epoch_end or state.get("loader", {}).get("epoch"),
    )


def _state(folder: Path) -> dict[str, Any]:
    try:
        return read_state(folder)
    except ValueError as error:
        raise DamagedCheckpoint(folder, "state.json is not whole") from error


@dataclass(frozen=True)
class Finding:
    """What a check of one checkpoint, or of a pointer file, found."""

    path: Path
    fault: str | None
    """None if it is whole."""
    manifest: Manifest | None = None
    """Of a whole checkpoint."""


def verify_all(path: str | Path) -> Iterator[Finding]:
    """Compare a checkpoint, or all of a run, with what was written, byte for byte.

    Findings come one by one, oldest checkpoint first. A run's pointer files are among them only
    where they name nothing.

    Args:
        path: a checkpoint's folder, a run folder, or a pointer file.

    Raises:
        UserError: there is no checkpoint.
    """
    path = Path(path)
    if path.is_file():
        name = read_pointer(path)
        if name is None or not (path.parent / name).is_dir():
            raise UserError(f"PATH {path} is neither a checkpoint nor the name of one")
        yield _check(path.parent / name)
        return
    if path.is_dir() and is_checkpoint(path):
        yield _check(path)
        return
    folders = [folder for _, folder in CheckpointFolder(path).checkpoints()]
    if not folders:
        find_checkpoint(path, "PATH")  # which says what there is instead
    for folder in reversed(folders):
        finding = _check(folder)
        # A run that is going on removes old ones.
        if finding.fault is None or folder.is_dir():
            yield finding
    for pointer in (path / LAST, path / BEST):
        name = read_pointer(pointer)
        if pointer.is_file() and (name is None or not (path / name).is_dir()):
            yield Finding(pointer, f"it names {name or 'nothing'}, which is not there")


def _check(folder: Path) -> Finding:
    try:
        return Finding(folder, None, verify(folder))
    except DamagedCheckpoint as error:
        return Finding(folder, error.reason)
    except UserError as error:
        return Finding(folder, str(error))
