"""Outputs: that they can be written is known before the work whose result they hold."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from scalerun.dataclass.errors import UserError


def prepare_output_file(flag: str, path: Path) -> None:
    """Make the folder of a file that will be written in the end; a file that is there stays.

    Args:
        flag: the flag that names the file.

    Raises:
        UserError: the file could not be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be written: {error.strerror}") from error
    if path.is_dir():
        raise UserError(f"{flag} {path} is a folder; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{flag} {path} cannot be written: permission denied; name another file")


def prepare_output_files(
    outputs: Mapping[str, str | None], *, inputs: Iterable[str | None]
) -> None:
    """As :func:`prepare_output_file` for each flag that names a file.

    Args:
        outputs: files by the flags that name them.
        inputs: what the command reads.

    Raises:
        UserError: one could not be written, two are one file, or one is an input.
    """
    named: dict[Path, str] = {}
    for flag, name in outputs.items():
        if name is None:
            continue
        path = Path(name)
        prepare_output_file(flag, path)
        other = named.setdefault(path.resolve(), flag)
        if other != flag:
            raise UserError(f"{other} and {flag} are both {path}; name two files")
    refuse_inputs(outputs, inputs)


def refuse_inputs(outputs: Mapping[str, str | None], inputs: Iterable[str | None]) -> None:
    """Refuse to write over what is read.

    Args:
        outputs: files by the flags that name them.
        inputs: files, or folders whose files are not to be replaced.

    Raises:
        UserError: an output is one of them.
    """
    read = [Path(name).resolve() for name in inputs if name]
    for flag, name in outputs.items():
        path = Path(name) if name is not None else None
        if path is None or not path.is_file():
            continue
        for source in read:
            if source in (path.resolve(), *path.resolve().parents):
                raise UserError(
                    f"{flag} {path} is a file that this command reads; name another file"
                )


def prepare_new_file(flag: str, path: Path, *, force: bool) -> None:
    """As :func:`prepare_output_file`, but a file that is there is only replaced on demand.

    Raises:
        UserError: it is there and ``force`` is not given, or it could not be written.
    """
    prepare_output_file(flag, path)
    if path.exists() and not force:
        raise UserError(f"{flag} {path} exists; give --force to replace it")


def refuse_full_folder(flag: str, path: Path) -> None:
    """Refuse an output folder whose content would mix with what is there.

    Raises:
        UserError: it is a file, or a folder with something in it.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{flag} {path} is a file; name a folder")
    if path.is_dir() and any(entry.name != ".lock" for entry in path.iterdir()):
        raise UserError(f"{flag} {path} is not empty; name a new folder")
