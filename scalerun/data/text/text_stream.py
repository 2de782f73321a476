"""Lines of text files, compressed or not, with bounded memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import zstandard

CHUNK_BYTES = 1 << 20
COMPRESSED_CHUNK_BYTES = 1 << 16
"""Smaller, since a chunk can grow a thousandfold."""
MAX_LINE_BYTES = 1 << 30
"""A longer line is no document: it is reported instead of filling the memory."""
GZIP_WINDOW = 16 + zlib.MAX_WBITS


class StreamError(ValueError):
    """The bytes of a file cannot be read to their end; the message is the reason."""


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def read_chunks(path: Path) -> Iterator[bytes]:
    """The content of a file, decompressed when its name ends in ``.gz`` or ``.zst``.

    Raises:
        StreamError: the compressed stream is damaged or ends early.
        OSError: the file cannot be read.
    """
    suffix = path.suffix.lower()
    size = COMPRESSED_CHUNK_BYTES if suffix in (".gz", ".zst") else CHUNK_BYTES
    with path.open("rb") as file:
        raw = iter(lambda: file.read(size), b"")
        if suffix == ".gz":
            make = partial(zlib.decompressobj, GZIP_WINDOW)
            yield from _decompressed(raw, make, padding=b"\0")  # as gzip itself allows
        elif suffix == ".zst":
            yield from _decompressed(raw, lambda: zstandard.ZstdDecompressor().decompressobj())
        else:
            yield from raw


def _decompressed(
    raw: Iterator[bytes], make: Callable[[], _Decompressor], *, padding: bytes = b""
) -> Iterator[bytes]:
    """Decompress concatenated members, in pieces that the input's chunks bound.

    Args:
        padding: bytes that may stand behind a member.
    """
    stream: _Decompressor | None = None
    first = True
    for chunk in raw:
        while chunk:
            if stream is None and not first:
                chunk = chunk.lstrip(padding)
                if not chunk:
                    break
            first = False
            stream = make() if stream is None else stream
            try:
                data = stream.decompress(chunk)
            except (zlib.error, zstandard.ZstdError) as error:
                raise StreamError(f"the compressed stream is damaged ({error})") from error
            if data:
                yield data
            chunk = stream.unused_data if stream.eof else b""
            stream = None if stream.eof else stream
    if stream is not None:
        raise StreamError("the compressed stream ends early")


def read_lines(path: Path) -> Iterator[bytes | StreamError]:
    """Lines without their line feed; only the byte 0x0A ends a line.

    A line longer than :data:`MAX_LINE_BYTES`, and the place where a damaged stream ends, appear as
    an error in place of a line. A byte-order mark at the start is dropped.
    """
    parts: list[bytes] = []  # of a line that has not ended
    size = 0
    first = True
    chunks = read_chunks(path)
    while True:
        try:
            chunk = next(chunks, None)
        except StreamError as error:
            yield error
            return
        if chunk is None:
            break
        head, *rest = chunk.split(b"\n")
        if size <= MAX_LINE_BYTES:
            parts.append(head)
        size += len(head)
        for line in rest:
            yield _finished(parts, size, first)
            first = False
            parts, size = [line], len(line)
    if size:
        yield _finished(parts, size, first)


def _finished(parts: list[bytes], size: int, first: bool) -> bytes | StreamError:
    if size > MAX_LINE_BYTES:
        return StreamError(f"the line has {size:,} bytes, more than {MAX_LINE_BYTES:,}")
    line = parts[0] if len(parts) == 1 else b"".join(parts)
    return line.removeprefix(b"\xef\xbb\xbf") if first else line
