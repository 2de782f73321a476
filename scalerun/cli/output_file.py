"""Output files: that they can be written is known before the work whose result they hold."""

from __future__ import annotations

import os
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
