"""DigestMemo: content digests of files, computed once while a file stays as it is."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from scalerun.dataclass.errors import UserError

SAMPLE_BYTES = 1 << 26
"""Files up to this size are digested whole at start-up; larger ones at evenly spaced places."""
SAMPLE_PIECES = 64
SETTLED_NS = 2_000_000_000
"""A file changed less than this long ago may change again within the clock's resolution."""


class DigestMemo:
    """Remembers digests in a JSON file, by path, size and times of change.

    Args:
        path: where to remember them; a missing, damaged or read-only file only costs time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, str] = {}
        self._read_ns = -1
        self._changed = False
        self._read_again()

    def whole(self, path: Path) -> str:
        """Digest of the whole content.

        Raises:
            UserError: the file cannot be read.
        """
        return self._digest(path, "whole")

    def sampled(self, path: Path) -> str:
        """Digest of size and content, the content of a large file being sampled.

        Raises:
            UserError: the file cannot be read.
        """
        return self._digest(path, "sampled")

    def remembers(self, path: Path) -> bool:
        """Whether `whole` would answer without reading the file."""
        return path.exists() and _entry(path, "whole") in self._known

    def save(self) -> None:
        """Write what was learnt; other processes' entries stay."""
        if not self._changed:
            return
        merged = {**_load(self.path), **self._known}
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(merged))
            os.replace(temporary, self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
        self._changed = False

    def _read_again(self) -> None:
        """Take over what other processes learnt since the last reading."""
        try:
            changed_ns = self.path.stat().st_mtime_ns
        except OSError:
            return
        if changed_ns != self._read_ns:
            self._known = {**_load(self.path), **self._known}
            self._read_ns = changed_ns

    def _digest(self, path: Path, kind: str) -> str:
        try:
            stat = path.stat()
            kind = "whole" if stat.st_size <= SAMPLE_BYTES else kind
            name = _entry(path, kind)
            if name not in self._known:
                self._read_again()
            if name not in self._known:
                digest = file_digest(path, 0 if kind == "whole" else SAMPLE_PIECES)
                if time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) < SETTLED_NS:
                    return digest
                self._known[name] = digest
                self._changed = True
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        return self._known[name]


def file_digest(path: Path, pieces: int = 0) -> str:
    """Hex digest of a file's size and content; of ``pieces`` evenly spaced parts if not 0."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        state.update(size.to_bytes(8, "little"))
        if not pieces:
            while chunk := file.read(1 << 20):
                state.update(chunk)
        for i in range(pieces):
            length = SAMPLE_BYTES // pieces
            file.seek((size - length) * i // (pieces - 1))
            state.update(file.read(length))
    return state.hexdigest()


def sampled_digest(path: Path) -> str:
    """As :meth:`DigestMemo.sampled`, without a memory.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return file_digest(path, 0 if path.stat().st_size <= SAMPLE_BYTES else SAMPLE_PIECES)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _entry(path: Path, kind: str) -> str:
    stat = path.stat()
    return f"{kind} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {path.resolve()}"


def _load(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
