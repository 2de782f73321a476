"""Finding and reading checkpoints: for resuming, validating, generating."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from scalerun.checkpoint.checkpoint_folder import (
    BEST,
    CHECKPOINT_NAME,
    LAST,
    CheckpointFolder,
    read_pointer,
)
from scalerun.checkpoint.manifest import MANIFEST, DamagedCheckpoint, Manifest, verify
from scalerun.checkpoint.state_tree import flatten_tensors, merge_state, split_state
from scalerun.checkpoint.storage import load_tensors_into, read_shapes
from scalerun.checkpoint.writer import STATE
from scalerun.dataclass.errors import UserError

logger = logging.getLogger(__name__)

_REMEDIES = {
    "model": "use the architecture and the tokenizer that it was trained with",
    "optimizer": "use the same --optimizer, or start a new run from it: "
    "--save-dir NEW --restore-file OLD "
    "--reset-optimizer",
}
"""What to do about a part that does not fit."""
_RESETS = {
    "optimizer": "--reset-optimizer",
    "lr_scheduler": "--reset-lr-scheduler",
    "loader": "--reset-dataloader",
    "metrics": "--reset-meters",
    "throughput": "--reset-meters",
}
"""Flags of a new run that does without a part."""


def find_checkpoint(path: str | Path, flag: str = "--path", *, checksums: bool = True) -> Path:
    """The checkpoint that a user means, verified.

    Args:
        path: a checkpoint's folder; a run folder, which stands for its newest whole checkpoint;
            or a pointer file such as ``RUN/checkpoint_best``.
        flag: the flag to name in messages.
        checksums: also read every file; without, only names and sizes are compared.

    Raises:
        UserError: there is nothing, or the checkpoint that was named is damaged.
    """
    path = Path(path)
    if path.is_file():
        name = read_pointer(path)
        if name is None or not (path.parent / name).is_dir():
            raise UserError(f"{flag} {path} is neither a checkpoint nor the name of one")
        path = path.parent / name
    if not path.is_dir():
        raise UserError(f"{flag} {path} does not exist; {_what_exists(path.parent)}")
    if is_checkpoint(path):
        verify(path, checksums=checksums)
        return path
    found = newest_whole(
        CheckpointFolder(path), checksums=checksums, remedy=f"give {flag} another run"
    )
    if found is None:
        raise UserError(f"{flag} {path} holds no checkpoint; {_what_exists(path.parent)}")
    return found


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is meant to be a checkpoint, by its name or by what it holds."""
    named = CHECKPOINT_NAME.fullmatch(folder.name) is not None
    return named or any((folder / name).exists() for name in (MANIFEST, STATE))


def newest_whole(
    folder: CheckpointFolder,
    on_damaged: Callable[[int, Path, str], None] | None = None,
    *,
    checksums: bool = True,
    remedy: str = "move them away to start anew",
) -> Path | None:
    """The newest checkpoint of a run that is what its manifest says; None when there is none.

    Args:
        on_damaged: called with the update, the folder and the finding of each that is passed over.
        checksums: as for :func:`find_checkpoint`.
        remedy: what to do where none is whole.

    Raises:
        UserError: there are checkpoints and all of them are damaged.
    """
    damaged: list[tuple[int, Path, str]] = []
    whole = None
    for num_updates, path in folder.checkpoints():
        try:
            verify(path, checksums=checksums)
        except DamagedCheckpoint as error:
            damaged.append((num_updates, path, error.reason))
            continue
        whole = path
        break
    for num_updates, path, reason in damaged:
        if whole is not None:
            logger.warning(
                "%s is damaged (%s) and is left as it is; using %s", path, reason, whole.name
            )
        if on_damaged is not None:
            on_damaged(num_updates, path, reason)
    if damaged and whole is None:
        findings = "; ".join(f"{path.name}: {reason}" for _, path, reason in damaged)
        raise UserError(f"every checkpoint in {folder.path} is damaged ({findings}); {remedy}")
    return whole


def read_state(path: str | Path) -> dict[str, Any]:
    """Everything in a checkpoint that is not a tensor, by part.

    Args:
        path: a checkpoint's folder.
    """
    state: dict[str, Any] = json.loads((Path(path) / STATE).read_bytes())
    return state


def run_file(path: str | Path, name: str) -> Path:
    """A file that the run put into its checkpoints, such as ``config.yaml``.

    Raises:
        UserError: the checkpoint has no such file.
    """
    file = Path(path) / name
    if not file.is_file():
        raise UserError(f"checkpoint {path} has no {name}")
    return file


def load_tensors(path: str | Path, tensors: Mapping[str, Any]) -> None:
    """Fill tensors in place from a checkpoint.

    Args:
        path: a checkpoint's folder, verified.
        tensors: by part and name, such as ``{"model": {"embed.weight": ...}}``, nested at will. A
            part must fit the checkpoint's exactly; parts that are left out are not read.

    Raises:
        UserError: names or shapes differ; the first differences are listed.
    """
    path = Path(path)
    flat = flatten_tensors(tensors)
    saved = read_shapes(path)
    for part in tensors:
        wanted = {name: t for name, t in flat.items() if name.startswith(f"{part}.")}
        stored = {name: s for name, s in saved.items() if name.startswith(f"{part}.")}
        differences = _differences(wanted, stored)
        if differences:
            shown = "; ".join(differences[:3])
            more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise UserError(
                f"checkpoint {path} does not fit the {part.replace('_', ' ')}: {shown}{more}; "
                f"{_REMEDIES.get(part, 'use the settings that it was trained with')}"
            )
    load_tensors_into(path, flat)


def load_state(
    path: Path, state: Mapping[str, Any], *, optional: Collection[str] = ()
) -> dict[str, Any]:
    """Restore objects from a verified checkpoint, each from the part of its name.

    Args:
        state: objects with ``state_dict`` and ``load_state_dict``.
        optional: parts that are left alone when the checkpoint does not have them.

    Returns:
        The checkpoint's plain values by part, as :func:`read_state` gives them.

    Raises:
        UserError: a part is missing or does not fit.
    """
    plain = read_state(path)
    missing = [part for part in state if part not in plain and part not in optional]
    if missing:
        resets = "".join(
            f" {flag}" for flag in dict.fromkeys(_RESETS.get(p) for p in missing) if flag
        )
        raise UserError(
            f"checkpoint {path} has no {', '.join(missing)} (it has {', '.join(sorted(plain))}): "
            "it was converted or averaged, or an older scalerun wrote it; start a new run from it: "
            f"--save-dir NEW --restore-file OLD{resets}"
        )
    templates = {
        part: split_state(owner.state_dict())[0] for part, owner in state.items() if part in plain
    }
    load_tensors(path, templates)
    for part, template in templates.items():
        state[part].load_state_dict(merge_state(template, plain[part]))
    return plain


def whole_manifests(folder: CheckpointFolder, damaged: Collection[int] = ()) -> list[Manifest]:
    """Manifests of the run's checkpoints whose files have the right sizes, newest first.

    Args:
        damaged: updates whose checkpoints are known to be damaged all the same.
    """
    manifests = []
    for num_updates, path in folder.checkpoints():
        if num_updates in damaged:
            continue
        try:
            manifests.append(verify(path, checksums=False))
        except UserError:
            continue
    return manifests


def _differences(wanted: Mapping[str, Tensor], stored: Mapping[str, Any]) -> list[str]:
    """What a user has to know about two sets of named shapes, in one phrase each."""
    found = []
    for name in [*wanted, *(name for name in stored if name not in wanted)]:
        if name not in stored:
            found.append(f"{name} {tuple(wanted[name].shape)} is not in the checkpoint")
        elif name not in wanted:
            found.append(f"{name} {tuple(stored[name])} is only in the checkpoint")
        elif tuple(wanted[name].shape) != tuple(stored[name]):
            found.append(
                f"{name} is {tuple(stored[name])} in the checkpoint, not "
                f"{tuple(wanted[name].shape)}"
            )
    return found


def _what_exists(folder: Path) -> str:
    """A phrase on the checkpoints in a folder, for messages."""
    if not folder.is_dir():
        return f"neither does {folder}"
    names = [entry.name for _, entry in CheckpointFolder(folder).checkpoints()[:5]]
    names += [name for name in (LAST, BEST) if (folder / name).is_file()]
    if names:
        return f"{folder} has {', '.join(names)}"
    return f"{folder} has no checkpoints"
