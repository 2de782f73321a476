"""The checkpoints in a run folder, and the pointer files beside them."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from scalerun.checkpoint.atomic import replace_file, sync_folder
from scalerun.dataclass.errors import UserError

logger = logging.getLogger(__name__)

LAST = "checkpoint_last"
BEST = "checkpoint_best"

CHECKPOINT_NAME = re.compile(r"checkpoint_(\d+)")
_TEMPORARY = re.compile(r"\.checkpoint_\w+\.\d+\.(tmp|old)")


class CheckpointFolder:
    """What lies in a run folder under the names of checkpoints.

    Only one process may write to it at a time; the caller sees to that.

    Args:
        path: need not exist before :meth:`open_for_writing`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def open_for_writing(self) -> None:
        """Create the folder, and clear what a save that was cut short has left.

        Raises:
            UserError: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".{LAST}.{os.getpid()}.tmp"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(
                f"--save-dir {self.path} cannot be written: {error.strerror}; name a folder that "
                "you may write to"
            ) from error
        for entry in self.path.iterdir():
            if _TEMPORARY.fullmatch(entry.name):
                logger.info("removing %s, left by a save that was cut short", entry)
                _remove(entry)

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(number of updates, folder) of everything that is named like a checkpoint, newest first.

        Nothing is said about whether they are whole.
        """
        if not self.path.is_dir():
            return []
        found = []
        for entry in self.path.iterdir():
            match = CHECKPOINT_NAME.fullmatch(entry.name)
            if match and entry.is_dir():
                found.append((int(match[1]), entry))
        return sorted(found, reverse=True)

    def checkpoint(self, num_updates: int) -> Path:
        """The folder of one checkpoint."""
        return self.path / f"checkpoint_{num_updates}"

    def temporary(self, num_updates: int) -> Path:
        """Where a checkpoint is written before it gets its name."""
        return self.path / f".checkpoint_{num_updates}.{os.getpid()}.tmp"

    def commit(self, temporary: Path, num_updates: int) -> Path:
        """Give a complete, synced checkpoint its name; whatever had that name is moved aside."""
        target = self.checkpoint(num_updates)
        if target.exists():
            aside = _free_name(target)
            logger.warning("%s is damaged; it is kept as %s", target, aside.name)
            target.rename(aside)
        temporary.rename(target)
        sync_folder(self.path)
        return target

    def remove(self, num_updates: int) -> None:
        """Delete a checkpoint; one that is being deleted never looks like a damaged one."""
        folder = self.checkpoint(num_updates)
        doomed = self.path / f".{folder.name}.{os.getpid()}.old"
        try:
            folder.rename(doomed)
        except OSError as error:
            logger.warning("%s cannot be removed: %s", folder, error.strerror)
            return
        _remove(doomed)

    def point(self, pointer: str, num_updates: int) -> None:
        """Write a pointer file, unless it says so already."""
        name = self.checkpoint(num_updates).name
        if read_pointer(self.path / pointer) != name:
            replace_file(self.path / pointer, f"{name}\n".encode())


def read_pointer(path: Path) -> str | None:
    """The folder name in a pointer file; None when there is no such file or no name in it."""
    try:
        with path.open(encoding="utf-8") as stream:
            name = stream.read(256).strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if name and Path(name).name == name else None


def _free_name(target: Path) -> Path:
    candidate, number = target.with_name(f"{target.name}.damaged"), 1
    while candidate.exists():
        number += 1
        candidate = target.with_name(f"{target.name}.damaged.{number}")
    return candidate


def _remove(path: Path) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error.strerror)
