"""TokenFile: the tokens of one text file, memory-mapped.

Layout: a header of :data:`HEADER_BYTES`, then four or five sections, each starting at a multiple
of 8: tokens (uint16 or uint32, every document followed by its end symbol), document ends (int64,
cumulative tokens), document sizes (int64, UTF-8 bytes), bad records (JSON lines), and for documents
that begin with a source its length (int64, tokens). The header holds a checksum of itself and one
of the sections.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from scalerun.data.text.jsonl_dataset import QuarantinedRecord, ReadCounts
from scalerun.data.tokenizers.base_tokenizer import Ids

MAGIC = b"SCALETOK"
VERSION = 1
HEADER_BYTES = 4096
PREFIX = struct.Struct("<8sII")  # magic, checksum of the JSON, its length
ALIGNMENT = 8
SYNCED_BYTES = 1 << 20
"""Smaller files are not forced to the disk: thousands of them would take minutes, and whatever a
power failure does to them, the checksums tell."""


class InvalidTokenFile(ValueError):
    """The file is damaged, unfinished or of another kind; the message says which."""


@dataclass(frozen=True)
class TokenFile:
    """An open token file of N documents."""

    path: Path
    tokens: npt.NDArray[Any]
    """All documents, each followed by its end symbol."""
    ends: npt.NDArray[np.int64]
    """(N + 1,) cumulative tokens: document i is ``tokens[ends[i] : ends[i + 1]]``."""
    document_bytes: npt.NDArray[np.int64]
    """(N,) UTF-8 bytes of the text that each document predicts."""
    num_bytes: int
    """UTF-8 bytes of what all documents predict."""
    counts: ReadCounts
    """What became of the lines of the text file."""
    quarantined: list[QuarantinedRecord]
    """The bad records that were left out."""
    checksum: int
    """crc32 of the sections, as the header states it."""
    sources: npt.NDArray[np.int64] | None = None
    """(N,) tokens at the start of each document that are given, not predicted; None for none."""

    @property
    def num_documents(self) -> int:
        """Documents of the text file."""
        return len(self.document_bytes)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, their ends included."""
        return len(self.tokens)

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted: all but those of the sources."""
        return len(self.tokens) - (0 if self.sources is None else int(self.sources.sum()))

    @classmethod
    def open(cls, path: Path, key: str) -> TokenFile:
        """Map a finished token file into memory; its checksum is *not* compared (see `verify`).

        Raises:
            InvalidTokenFile: it is not a whole token file made for ``key``.
            FileNotFoundError: there is none.
        """
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = _read_header(file.read(HEADER_BYTES))
            if header["version"] != VERSION or header["key"] != key:
                raise InvalidTokenFile("made from other text, by another tokenizer or version")
            if size != header["size"]:
                raise InvalidTokenFile(f"{size} bytes instead of {header['size']}")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        tokens, ends, lengths, records, *sources = (
            np.frombuffer(data, dtype=dtype, count=count, offset=start)
            for dtype, start, count in header["sections"]
        )
        num_documents = len(lengths)
        if len(ends) != num_documents + 1 or ends[0] != 0 or ends[-1] != len(tokens):
            raise InvalidTokenFile("its sections contradict each other")
        quarantined = [
            QuarantinedRecord(**json.loads(line)) for line in records.tobytes().splitlines()
        ]
        return cls(
            path=path,
            tokens=tokens,
            ends=ends,
            document_bytes=lengths,
            num_bytes=header["num_bytes"],
            counts=ReadCounts(**header["counts"]),
            quarantined=quarantined,
            checksum=header["checksum"],
            sources=sources[0] if sources else None,
        )

    def verify(self) -> None:
        """Read everything and compare the checksum.

        Raises:
            InvalidTokenFile: the sections are damaged.
        """
        checksum = 0
        with self.path.open("rb") as file:
            file.seek(HEADER_BYTES)
            while chunk := file.read(1 << 20):
                checksum = zlib.crc32(chunk, checksum)
        if checksum != self.checksum:
            raise InvalidTokenFile("its checksum does not fit its content")


def _read_header(raw: bytes) -> dict[str, Any]:
    if len(raw) < HEADER_BYTES:
        raise InvalidTokenFile("too short")
    magic, checksum, length = PREFIX.unpack_from(raw)
    content = raw[PREFIX.size : PREFIX.size + length]
    if magic != MAGIC or zlib.crc32(content) != checksum:
        raise InvalidTokenFile("no whole header")
    header: dict[str, Any] = json.loads(content)
    return header


class TokenFileWriter:
    """Writes a token file beside its final name and renames it when everything is in it.

    Use as a context manager; without :meth:`commit`, or after an error, nothing remains.

    Args:
        path: the final name.
        key: what the file is made from.
        dtype: numpy type of the tokens.
        end_id: the end symbol.
        alone: no other process writes this file at the same time.
    """

    def __init__(
        self, path: Path, *, key: str, dtype: str, end_id: int, alone: bool = True
    ) -> None:
        self.path = path
        self.key = key
        self.dtype = np.dtype(dtype)
        self.end = np.array([end_id], dtype=self.dtype)
        # Who holds the lock takes over what a killed process left behind.
        owner = "" if alone else f".{os.getpid()}"
        self.temporary = path.with_name(f".{path.name}{owner}.tmp")
        self._file = self.temporary.open("wb")
        self._file.write(b"\0" * HEADER_BYTES)
        self._checksum = 0
        self._position = HEADER_BYTES
        self._num_tokens = 0
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._bytes: list[npt.NDArray[np.int64]] = []
        self._sources: list[npt.NDArray[np.int64]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self.temporary.unlink(missing_ok=True)

    def add(
        self,
        documents: Sequence[Ids],
        num_bytes: Sequence[int],
        sources: Sequence[int] | None = None,
    ) -> None:
        """Append documents, given without their end symbol.

        Args:
            num_bytes: UTF-8 size of the text that each predicts.
            sources: tokens at the start of each that are not predicted; every call of a file has
                them, or none has.
        """
        parts: list[npt.NDArray[Any]] = []
        for ids in documents:
            parts += [np.asarray(ids, dtype=self.dtype), self.end]
        tokens = np.concatenate(parts) if parts else np.empty(0, self.dtype)
        self._write(tokens.tobytes())
        self._num_tokens += len(tokens)
        self._lengths.append(np.array([len(ids) + 1 for ids in documents], dtype=np.int64))
        self._bytes.append(np.array(num_bytes, dtype=np.int64))
        if sources is not None:
            self._sources.append(np.array(sources, dtype=np.int64))

    def commit(self, counts: ReadCounts, quarantined: Sequence[QuarantinedRecord]) -> None:
        """Write the remaining sections and the header, then give the file its name."""
        empty = [np.empty(0, dtype=np.int64)]
        lengths = np.concatenate(self._lengths or empty)
        num_bytes = np.concatenate(self._bytes or empty)
        ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        records = "".join(json.dumps(asdict(record)) + "\n" for record in quarantined).encode()
        sections = [(self.dtype.str, HEADER_BYTES, self._num_tokens)]
        rest = [
            ("<i8", ends.tobytes(), len(ends)),
            ("<i8", num_bytes.tobytes(), len(num_bytes)),
            ("|u1", records, len(records)),
        ]
        if self._sources:
            sources = np.concatenate(self._sources)
            rest.append(("<i8", sources.tobytes(), len(sources)))
        for dtype, content, count in rest:
            self._write(b"\0" * (-self._position % ALIGNMENT))
            sections.append((dtype, self._position, count))
            self._write(content)
        header = {
            "version": VERSION,
            "key": self.key,
            "size": self._position,
            "sections": sections,
            "num_bytes": int(num_bytes.sum()),
            "counts": asdict(counts),
            "checksum": self._checksum,
        }
        content = json.dumps(header).encode()
        assert PREFIX.size + len(content) <= HEADER_BYTES
        self._file.seek(0)
        self._file.write(PREFIX.pack(MAGIC, zlib.crc32(content), len(content)) + content)
        self._file.flush()
        if self._position >= SYNCED_BYTES:
            os.fsync(self._file.fileno())
        os.replace(self.temporary, self.path)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._checksum = zlib.crc32(data, self._checksum)
        self._position += len(data)
