"""The manifest: what a checkpoint consists of, and whether that is what lies there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scalerun.checkpoint.atomic import FileRecord, hash_file, replace_file
from scalerun.dataclass.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1
"""Raised when an older scalerun could not read what a newer one writes."""


class DamagedCheckpoint(UserError):
    """A checkpoint is not what its manifest says. ``reason`` holds the finding alone."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"checkpoint {folder} is damaged: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Manifest:
    """One checkpoint's list of files, and what the run knew when it was written."""

    num_updates: int
    files: dict[str, FileRecord]
    """By path relative to the checkpoint, with forward slashes; the manifest itself is not in."""
    version: str
    """Of scalerun."""
    torch_version: str
    world_size: int
    """Processes that wrote it."""
    kinds: list[str] = field(default_factory=lambda: ["update"])
    """Which retention rules look at it: ``update``, ``epoch`` or both."""
    epoch_end: int | None = None
    """The epoch (from 1) that ended with this update."""
    metric: float | None = None
    metric_name: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(record.size for record in self.files.values())

    def to_json(self) -> bytes:
        """The manifest's text, which carries a digest of itself."""
        fields: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        fields["digest"] = _digest(fields)
        return _text(fields)

    def rewrite(self, folder: Path) -> None:
        """Replace the manifest of a checkpoint."""
        replace_file(folder / MANIFEST, self.to_json())


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        DamagedCheckpoint: there is none, or it is not whole.
        UserError: a newer scalerun wrote it.
    """
    try:
        content = (folder / MANIFEST).read_bytes()
        fields = json.loads(content)
    except FileNotFoundError:
        raise DamagedCheckpoint(folder, f"it has no {MANIFEST}") from None
    except OSError as error:
        raise DamagedCheckpoint(folder, f"{MANIFEST} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedCheckpoint(folder, f"{MANIFEST} is not whole") from error
    if not isinstance(fields, dict):
        raise DamagedCheckpoint(folder, f"{MANIFEST} is not whole")
    found = fields.get("format")
    if isinstance(found, int) and found > FORMAT:
        raise UserError(
            f"checkpoint {folder} has format {found} and this scalerun reads up to {FORMAT}; "
            "install a newer one"
        )
    # Other spellings of the same values, such as 1E-5, have the same digest.
    changed = content != _text(fields)
    if fields.pop("digest", None) != _digest(fields) or changed:
        raise DamagedCheckpoint(folder, f"{MANIFEST} does not match its own digest")
    del fields["format"]
    files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
    return Manifest(files=files, **fields)


def verify(folder: Path, *, checksums: bool = True) -> Manifest:
    """Compare a checkpoint with its manifest.

    Args:
        checksums: also read every file; without, only names and sizes are compared.

    Raises:
        DamagedCheckpoint: something is missing, has another size or another content.
    """
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError:
            raise DamagedCheckpoint(folder, f"{name} is missing") from None
        if size != record.size:
            raise DamagedCheckpoint(folder, f"{name} has {size} bytes, not {record.size}")
    if checksums:
        for name, record in manifest.files.items():
            try:
                digest = hash_file(folder / name)
            except OSError as error:
                raise DamagedCheckpoint(
                    folder, f"{name} cannot be read: {error.strerror}"
                ) from error
            if digest != record.sha256:
                raise DamagedCheckpoint(folder, f"the content of {name} has changed")
    return manifest


def _text(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=1) + "\n").encode()


def _digest(fields: dict[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
