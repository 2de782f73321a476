"""Writing one checkpoint: under a temporary name, forced to the disk, then renamed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from scalerun.checkpoint.atomic import FileRecord, sync_tree, write_file
from scalerun.checkpoint.checkpoint_folder import CheckpointFolder
from scalerun.checkpoint.manifest import MANIFEST, Manifest
from scalerun.checkpoint.state_tree import TensorTree, flatten_tensors
from scalerun.checkpoint.storage import bytes_needed, save_tensors
from scalerun.dataclass.errors import UserError
from scalerun.distributed.ranks import ALONE, Control

STATE = "state.json"
"""Holds everything that is not a tensor."""

SPARE_BYTES = 1 << 20
"""Room asked for beyond the files of a checkpoint: pointers, logs, the index of tensors."""


@dataclass(frozen=True)
class Content:
    """What a checkpoint will hold."""

    manifest: Manifest
    """Its list of files is filled in when they are written."""
    tensors: TensorTree
    plain: bytes
    """The text of :data:`STATE`."""
    run_files: Mapping[str, bytes]

    @property
    def num_updates(self) -> int:
        """The update that is saved."""
        return self.manifest.num_updates


def check_space(
    folder: CheckpointFolder, content: Content, control: Control = ALONE.control
) -> None:
    """Refuse to start a write that cannot end well; every rank calls it.

    Raises:
        UserError: the disk has too little room.
    """
    needed = sum(control.gather(bytes_needed(flatten_tensors(content.tensors))))
    needed += len(content.plain) + SPARE_BYTES
    needed += sum(len(file) for file in content.run_files.values())
    control.on_main(lambda: _check_disk(folder, content, needed))


def _check_disk(folder: CheckpointFolder, content: Content, needed: int) -> None:
    try:
        available = shutil.disk_usage(folder.path).free
    except OSError as error:
        raise write_error(folder, content.num_updates, error) from error
    if available < needed:
        raise UserError(
            f"--save-dir {folder.path} has {available} bytes free and checkpoint_"
            f"{content.num_updates} needs {needed}; make room or lower --keep-last-updates "
            "(the checkpoints there are intact)"
        )


def write_checkpoint(
    folder: CheckpointFolder, content: Content, control: Control = ALONE.control
) -> Manifest:
    """Write and commit a checkpoint; every rank calls it, with its own part of the tensors.

    A process that dies in here leaves a folder with a temporary name at worst.

    Returns:
        The manifest as written.

    Raises:
        OSError: something could not be written; nothing is left behind.
    """
    temporary = control.from_main(folder.temporary(content.num_updates))
    try:
        control.on_main(lambda: _make_anew(temporary))
        own = control.together(lambda: save_tensors(temporary, content.tensors, control.group))
        files = {name: file for part in control.gather(own) for name, file in part.items()}
        manifest = control.on_main(lambda: _commit(folder, temporary, content, files))
    finally:
        if control.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def write_error(folder: CheckpointFolder, num_updates: int, error: OSError) -> UserError:
    """What to tell the user about a checkpoint that could not be written."""
    if not folder.path.is_dir():
        return UserError(
            f"checkpoint_{num_updates} could not be written: --save-dir {folder.path} is gone, it "
            "was deleted or moved during the run"
        )
    return UserError(
        f"checkpoint_{num_updates} could not be written to --save-dir {folder.path}: "
        f"{error.strerror or error}; the checkpoints there are intact"
    )


def _make_anew(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()


def _commit(
    folder: CheckpointFolder, temporary: Path, content: Content, tensors: dict[str, FileRecord]
) -> Manifest:
    """Write what is there once, with the list of all files, and give the checkpoint its name."""
    files = {STATE: write_file(temporary / STATE, content.plain)}
    for name, file in content.run_files.items():
        files[name] = write_file(temporary / name, file)
    manifest = replace(content.manifest, files=files | tensors)
    write_file(temporary / MANIFEST, manifest.to_json())
    sync_tree(temporary)
    folder.commit(temporary, content.num_updates)
    return manifest
