"""Files that survive a crash: written, forced to the disk, and only then given their name."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


@dataclass(frozen=True)
class FileRecord:
    """What a file is supposed to hold."""

    size: int
    """Bytes."""
    sha256: str
    """Hex digest."""


class HashingWriter(io.IOBase):
    """Passes bytes on to a file while counting and hashing them.

    The digest is of what was meant to be written, so a write that the disk garbled is found too.
    """

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream
        self._hash = hashlib.sha256()
        self._size = 0
        self.failure: OSError | None = None
        """The first error, which the code between the caller and this file may have replaced."""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | memoryview) -> int:
        """Write and hash; remembers the first failure in ``failure``."""
        try:
            written = self._stream.write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self._hash.update(data)
        self._size += written
        return written

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self.failure = self.failure or error
            raise

    def fileno(self) -> int:
        # Whoever asks wants to sync the file, and torch does not always flush before it does.
        self.flush()
        return self._stream.fileno()

    def record(self) -> FileRecord:
        """Size and digest of what was written."""
        return FileRecord(self._size, self._hash.hexdigest())


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_file(path: Path, content: bytes) -> FileRecord:
    """Write a new file and force it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def replace_file(path: Path, content: bytes) -> None:
    """Give an existing or new file another content; a reader sees the old or the new one."""
    with replacing(path) as stream:
        stream.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A stream whose bytes become a file's content at the end; after an error nothing changes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Force the lists of names of a folder and of all folders below it to the disk."""
    for path, _, _ in os.walk(folder):
        sync_folder(Path(path))
