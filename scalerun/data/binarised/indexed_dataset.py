"""Fairseq's binarised text: an index of items beside one long row of token ids.

``NAME.bin`` holds the ids of all items, one behind the other. ``NAME.idx`` says where each item (a
sentence or a document) lies. Two forms of the index are read, the first is written; all numbers are
little-endian:

``MMIDIDX``: 9 bytes of magic, version 1 (uint64), code of the ids' type (uint8), number of items N
(uint64), sizes in tokens (N int32), places in bytes (N int64). Megatron puts a number D (uint64)
behind N and ends with the items at which documents begin (D int64, the last is N); the size of the
file tells which it is.

``TNTIDX``, the older form: 8 bytes of magic, version 1, code and size of the ids' type, N, N (each
uint64), then N + 1 counts of dimensions, N + 1 places in tokens, N sizes (each int64). Its ids are
one higher than the dictionary's.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from scalerun.data.token_block_dataset import Ints
from scalerun.dataclass.errors import UserError

MAGIC = b"MMIDIDX\0\0"
OLD_MAGIC = b"TNTIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQ")  # magic, version, type code, items
OLD_HEADER = struct.Struct("<8sQQQQQ")  # magic, version, type code, its size, items, sizes
DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
"""The codes 6 and 7 are floating-point numbers."""
FLOAT_CODES = (6, 7)
MOST_SMALL_SYMBOLS = 65500
"""Vocabularies below this size are stored in 16 bits, as fairseq does it."""
DICTIONARY = "dict.txt"
AGAIN = "copy both files again, or binarise the text again"


def stored_dtype(num_symbols: int) -> np.dtype[Any]:
    """The type that fairseq stores the ids of a vocabulary in: 16 bits, else 32."""
    return np.dtype("<u2" if num_symbols < MOST_SMALL_SYMBOLS else "<i4")


class StoredTokens:
    """The ids of a ``.bin`` file; a slice of them is read and compared with the dictionary.

    Args:
        path: the file, for messages.
        data: its ids as they are stored.
        num_symbols: size of the dictionary.
        dictionary: name of its file, for messages.
        first: what is stored for the id 0.
    """

    dtype = np.dtype(np.int64)
    """Whatever the file stores, so that files of several types can stand in one row."""

    def __init__(
        self,
        path: Path,
        data: npt.NDArray[Any],
        *,
        num_symbols: int,
        dictionary: str = DICTIONARY,
        first: int = 0,
    ) -> None:
        self.path = path
        self._data = data
        self._num_symbols = num_symbols
        self._dictionary = dictionary
        self._first = first

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, part: slice) -> npt.NDArray[np.int64]:
        """The ids of a slice.

        Raises:
            UserError: one of them is not in the dictionary.
        """
        ids = self._data[part].astype(np.int64) - self._first
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._num_symbols:
            stray = ids.min() if ids.min() < 0 else ids.max()
            raise UserError(
                f"{self.path} has the token {stray}, but {self._dictionary} has "
                f"{self._num_symbols} symbols (4 special ones included); the two do not belong "
                "together"
            )
        return ids


@dataclass(frozen=True)
class IndexedFile:
    """An open pair of files with N items."""

    path: Path
    """The ``.bin`` file."""
    tokens: StoredTokens
    """All items, memory-mapped."""
    ends: Ints
    """(N + 1,) cumulative tokens: item i is ``tokens[ends[i] : ends[i + 1]]``."""
    document_starts: Ints | None
    """Items at which documents begin, where the index says so."""
    sources: None = None
    """Every token is a target."""

    @property
    def num_documents(self) -> int:
        """Items; what they are is the writer's choice: sentences or documents."""
        return len(self.ends) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all items."""
        return len(self.tokens)

    @classmethod
    def open(cls, prefix: Path, *, num_symbols: int, dictionary: str = DICTIONARY) -> IndexedFile:
        """Map ``prefix.bin`` into memory and read ``prefix.idx``.

        Args:
            num_symbols: size of the dictionary.
            dictionary: name of its file, for messages.

        Raises:
            UserError: a file is missing, or damaged, or of another kind.
        """
        data, index = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
        for path, other in ((index, data), (data, index)):
            if not path.is_file():
                raise UserError(f"{path} is not there, but belongs to {other.name}; {AGAIN}")
        try:
            found = _read_index(index)
            size, stored = data.stat().st_size, int(found.ends[-1]) * found.dtype.itemsize
            if size != stored:
                raise UserError(
                    f"{data} has {size:,} bytes, but {index.name} names {stored:,}; {AGAIN}"
                )
            mapped: Any = np.memmap(data, found.dtype, mode="r") if size else np.empty(0, "<u2")
        except OSError as error:
            raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
        tokens = StoredTokens(
            data, mapped, num_symbols=num_symbols, dictionary=dictionary, first=found.first
        )
        return cls(data, tokens, found.ends, found.document_starts)


@dataclass(frozen=True)
class _Index:
    dtype: np.dtype[Any]
    ends: Ints
    document_starts: Ints | None = None
    first: int = 0


def _read_index(path: Path) -> _Index:
    with path.open("rb") as file:
        header = file.read(max(HEADER.size, OLD_HEADER.size) + 8)
        size = os.fstat(file.fileno()).st_size
    if header.startswith(MAGIC) and size >= HEADER.size:
        return _read_mapped(path, header, size)
    if header.startswith(OLD_MAGIC) and size >= OLD_HEADER.size:
        return _read_old(path, header, size)
    raise UserError(
        f"{path} is not an index of binarised text (it begins with {header[:9]!r}); give what "
        "scalerun.cli.preprocess or fairseq-preprocess wrote"
    )


def _read_mapped(path: Path, header: bytes, size: int) -> _Index:
    _, version, code, count = HEADER.unpack_from(header)
    dtype = _dtype(path, version, code)
    start, num_starts = HEADER.size, 0
    if size > start + 12 * count:
        num_starts = int.from_bytes(header[start : start + 8], "little")
        start += 8
    if size != start + 12 * count + 8 * num_starts:
        raise _Damaged(path, f"{size:,} bytes do not hold {count:,} items")
    sizes, places, starts = (
        np.fromfile(path, kind, number, offset=offset)
        for kind, number, offset in (
            ("<i4", count, start),
            ("<i8", count, start + 4 * count),
            ("<i8", num_starts, start + 12 * count),
        )
    )
    ends = _cumulated(path, sizes)
    if not np.array_equal(places, ends[:-1] * dtype.itemsize):
        raise _Damaged(path, "its places do not follow from its sizes")
    if not num_starts:
        return _Index(dtype, ends)
    if starts[0] != 0 or starts[-1] != count or (np.diff(starts) < 0).any():
        raise _Damaged(path, "the beginnings of its documents are not in order")
    return _Index(dtype, ends, np.unique(starts[:-1]))


def _read_old(path: Path, header: bytes, size: int) -> _Index:
    _, version, code, _, count, num_sizes = OLD_HEADER.unpack_from(header)
    dtype = _dtype(path, version, code)
    if num_sizes != count or size != OLD_HEADER.size + 8 * (3 * count + 2):
        raise _Damaged(path, f"{size:,} bytes do not hold {count:,} rows of tokens")
    numbers = np.fromfile(path, "<i8", offset=OLD_HEADER.size)
    dimensions, places, sizes = np.split(numbers, [count + 1, 2 * count + 2])
    ends = _cumulated(path, sizes)
    if not np.array_equal(dimensions, np.arange(count + 1)) or not np.array_equal(places, ends):
        raise _Damaged(path, "its places do not follow from its sizes")
    return _Index(dtype, ends, first=1)


def _dtype(path: Path, version: int, code: int) -> np.dtype[Any]:
    if version != VERSION:
        raise UserError(f"{path} has version {version} of the format; {VERSION} can be read")
    if code in FLOAT_CODES:
        raise UserError(f"{path} says that its data are floating-point numbers, not tokens")
    if code not in DTYPES:
        raise _Damaged(path, f"there is no type of tokens with the code {code}")
    return np.dtype(DTYPES[code])


def _cumulated(path: Path, sizes: npt.NDArray[Any]) -> Ints:
    if len(sizes) and sizes.min() < 0:
        raise _Damaged(path, "an item has a negative size")
    ends = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=ends[1:])
    return ends


class _Damaged(UserError):
    """An index that contradicts itself."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged: {reason}; {AGAIN}")


class IndexedWriter:
    """Writes ``prefix.bin`` and ``prefix.idx``; they get these names when everything is in them.

    Use as a context manager; without :meth:`commit`, or after an error, nothing remains.

    Args:
        prefix: the files' common name.
        dtype: type of the ids, one of :data:`DTYPES`.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
        self._paths = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]
        self._temporary = [path.with_name(f".{path.name}.tmp") for path in self._paths]
        self._file = self._temporary[0].open("wb")
        self._sizes: list[npt.NDArray[np.int32]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        for path in self._temporary:
            path.unlink(missing_ok=True)

    def add(self, tokens: npt.NDArray[Any], sizes: npt.NDArray[Any]) -> None:
        """Append items: their tokens one behind the other, and how many each has."""
        assert len(tokens) == sizes.sum()
        self._file.write(tokens.astype(self.dtype, copy=False).tobytes())
        self._sizes.append(sizes.astype("<i4"))

    def commit(self) -> None:
        """Write the index, force both files to the disk and give them their names."""
        sizes = np.concatenate([np.empty(0, dtype="<i4"), *self._sizes])
        places = (np.cumsum(sizes, dtype="<i8") - sizes) * self.dtype.itemsize
        with self._temporary[1].open("wb") as index:
            index.write(HEADER.pack(MAGIC, VERSION, self._code, len(sizes)))
            index.write(sizes.tobytes())
            index.write(places.astype("<i8").tobytes())
            for file in (self._file, index):
                file.flush()
                os.fsync(file.fileno())
        for temporary, path in zip(self._temporary, self._paths, strict=True):
            os.replace(temporary, path)
