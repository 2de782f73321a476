"""The folder of a run: who may write to it, and what is written before the first update."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import platform
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Self

from scalerun import __version__
from scalerun.dataclass.configs import ScalerunConfig
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.yaml_config import to_yaml
from scalerun.distributed.ranks import Control

CONFIG_FILE = "config.yaml"
COMMAND_FILE = "command.txt"
VERSIONS_FILE = "versions.json"
_LOCK_FILE = ".lock"
_LIBRARIES = ("torch", "numpy", "omegaconf", "sentencepiece", "tokenizers")


class RunFolder:
    """A run's folder, held by one run at a time.

    Entering makes the folder and locks it; a process that is killed gives the lock back.

    Args:
        path: of the folder.
        control: the ranks of the run, of which one holds the lock and writes.
        flag: the flag that names it, for messages.

    Raises:
        UserError: the folder cannot be written, or another run is using it.
    """

    def __init__(
        self, path: Path, control: Control | None = None, *, flag: str = "--save-dir"
    ) -> None:
        self.path = path
        self.flag = flag
        self.control = control or Control()
        self._lock: IO[str] | None = None

    def __enter__(self) -> Self:
        self.control.on_main(self._take)
        return self

    def _take(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / _LOCK_FILE).open("w")
        except OSError as error:
            raise UserError(
                f"{self.flag} {self.path} cannot be written: {error.strerror}; choose another "
                "folder"
            ) from error
        try:
            # Not flock: processes that prepare data would inherit it and outlive a killed run.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._lock.close()
            raise UserError(
                f"{self.flag} {self.path} is in use by another run; wait for it or choose another "
                "folder"
            ) from None

    def __exit__(self, *exc_info: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def write_description(
        self, cfg: ScalerunConfig, words: list[str], *, command: str = "scalerun.cli.train"
    ) -> None:
        """Write the resolved configuration, the command and the versions.

        Each file is replaced as a whole, so that a kill leaves the old one or the new one.

        Args:
            words: the command's arguments.
            command: the module that was run.
        """
        files = {
            CONFIG_FILE: to_yaml(cfg),
            COMMAND_FILE: shlex.join(["python", "-m", command, *words]) + "\n",
            VERSIONS_FILE: json.dumps(versions(), indent=2) + "\n",
        }
        self.control.on_main(lambda: self._write(files))

    def _write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            temporary = self.path / f".{name}.new"
            try:
                temporary.write_text(text, encoding="utf-8")
                temporary.replace(self.path / name)
            except OSError as error:
                raise UserError(
                    f"{self.path / name} cannot be written: {error.strerror}"
                ) from error


def versions() -> dict[str, str | None]:
    """Versions of the program, its libraries and Python, and the commit of the source if known."""
    found: dict[str, str | None] = {"scalerun": __version__, "commit": _commit()}
    found["python"] = platform.python_version()
    found["platform"] = platform.platform()
    for library in _LIBRARIES:
        found[library] = importlib.metadata.version(library)
    return found


def _commit() -> str | None:
    """The commit of the checkout this file lies in, with ``+`` when files differ from it."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
