"""Tensors in the format of torch.distributed.checkpoint, without executing pickles on loading."""

from __future__ import annotations

import enum
import io
import os
import pickle
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from scalerun.checkpoint.atomic import FileRecord, HashingWriter
from scalerun.checkpoint.manifest import DamagedCheckpoint
from scalerun.checkpoint.state_tree import TensorTree

METADATA = ".metadata"
BYTES_PER_TENSOR = 4096
"""More than what each tensor adds to its own bytes: archive headers, padding, an entry of names."""

_ALLOWED_GLOBALS = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}

_UNREADABLE = (
    OSError,
    EOFError,
    ImportError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


def save_tensors(
    folder: Path, tensors: TensorTree, process_group: ProcessGroup | None = None
) -> dict[str, FileRecord]:
    """Write a tree of tensors into a new folder and force it to the disk.

    Every rank of ``process_group`` must call this, each with its own shards.

    Returns:
        This rank's files.

    Raises:
        OSError: a file could not be written.
    """
    _quiet()
    writer = dcp.FileSystemWriter(folder, overwrite=False)
    files = _HashingFileSystem()
    writer.fs = files
    try:
        dcp.save(
            tensors,
            storage_writer=writer,
            process_group=process_group,
            no_dist=process_group is None,
        )
    except CheckpointException as error:
        raise files.failure() or _cause(error) from error
    return files.records()


def load_tensors_into(
    folder: Path, tensors: Mapping[str, Tensor], process_group: ProcessGroup | None = None
) -> None:
    """Fill tensors in place from a folder that has been verified; other tensors are not read.

    Args:
        tensors: by flat name; names and shapes must be those of the checkpoint.
    """
    if not tensors:
        return
    _quiet()
    reader = _SafeReader(folder)
    try:
        dcp.load(
            dict(tensors),
            storage_reader=reader,
            process_group=process_group,
            no_dist=process_group is None,
        )
    except CheckpointException as error:
        raise _cause(error) from error


def read_shapes(folder: Path) -> dict[str, torch.Size]:
    """Full shape of every tensor in a checkpoint, by flat name."""
    entries = _SafeReader(folder).metadata.state_dict_metadata
    return {name: cast(TensorStorageMetadata, entry).size for name, entry in entries.items()}


def stage(tensors: TensorTree) -> TensorTree:
    """Copy a tree of tensors to the host, so that training may go on while it is written."""
    return dict(BlockingAsyncStager().stage(tensors))


def bytes_needed(tensors: Mapping[str, Tensor]) -> int:
    """Upper bound of the bytes that this rank's part of the tensors takes on the disk."""
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors.values())
    return sum(t.numel() * t.element_size() + BYTES_PER_TENSOR for t in local)


class StoredTensors:
    """The tensors of a verified checkpoint, by flat name; each is read when it is asked for.

    Raises:
        DamagedCheckpoint: the index cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        _quiet()
        self._reader = _SafeReader(folder)
        entries = self._reader.metadata.state_dict_metadata
        self._entries = {name: cast(TensorStorageMetadata, e) for name, e in entries.items()}

    def templates(self, part: str) -> dict[str, Tensor]:
        """Shapes and number formats of a part's tensors, by name within it, without memory."""
        return {
            name.removeprefix(f"{part}."): template(entry.size, entry.properties.dtype)
            for name, entry in self._entries.items()
            if name.startswith(f"{part}.")
        }

    def parts(self) -> list[str]:
        """The parts that have tensors, in the order of the index."""
        return list(dict.fromkeys(name.split(".", 1)[0] for name in self._entries))

    def read(self, name: str) -> Tensor:
        """One tensor, whole; reading takes twice its size.

        Args:
            name: with its part, such as ``model.embedding.tokens.weight``.
        """
        entry = self._entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            dcp.load({name: tensor}, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:
            raise _cause(error) from error
        return tensor


def template(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape and number format that takes the memory of one number."""
    return torch.zeros((), dtype=dtype).expand(shape)


def save_one_by_one(
    folder: Path, templates: TensorTree, read: Callable[[str], Tensor]
) -> dict[str, FileRecord]:
    """As :func:`save_tensors` in one process, holding one tensor in memory at a time.

    torch keeps all tensors of a file until it is closed, so each gets a file of its own.

    Args:
        templates: shapes and number formats, as :func:`template` gives them.
        read: makes the tensor of a flat name; called once for each.
    """
    _quiet()
    writer = dcp.FileSystemWriter(folder, overwrite=False, single_file_per_rank=False)
    files = _HashingFileSystem()
    writer.fs = files
    try:
        dcp.save(templates, storage_writer=writer, planner=_LazyPlanner(read), no_dist=True)
    except CheckpointException as error:
        raise files.failure() or _cause(error) from error
    return files.records()


class _LazyPlanner(DefaultSavePlanner):
    """Asks for each tensor at the moment when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._read(write_item.index.fqn)


class _HashingFileSystem(FileSystem):
    """Local files whose sizes and digests are known once they are written."""

    def __init__(self) -> None:
        self._writers: dict[Path, HashingWriter] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            writer = HashingWriter(cast(Any, stream))
            self._writers[Path(path)] = writer
            yield writer
            writer.flush()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self._writers[Path(new_path)] = self._writers.pop(Path(path))

    def records(self) -> dict[str, FileRecord]:
        return {path.name: writer.record() for path, writer in self._writers.items()}

    def failure(self) -> OSError | None:
        return next((w.failure for w in self._writers.values() if w.failure), None)


def _enum_member(cls: Any, name: Any) -> Any:
    """Stands in for ``getattr``, by which early releases of Python 3.11 pickle enum members."""
    if isinstance(cls, enum.EnumMeta) and name in cls.__members__:
        return cls.__members__[name]
    raise pickle.UnpicklingError(f"{METADATA} reads {name!r} of {cls!r}, which is not allowed")


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the classes that describe tensors, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name in _ALLOWED_GLOBALS.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which is not allowed")


class _SafeReader(dcp.FileSystemReader):
    """Reads the index with :class:`_MetadataUnpickler`; torch reads tensors as weights only.

    The index is read here, since inside ``dcp.load`` an error would be logged, then replaced.

    Raises:
        DamagedCheckpoint: the index cannot be read, or holds anything but tensors.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            with (folder / METADATA).open("rb") as stream:
                metadata = _MetadataUnpickler(stream).load()
        except _UNREADABLE as error:
            raise DamagedCheckpoint(folder, f"{METADATA} cannot be read: {error}") from error
        if not isinstance(metadata, Metadata):
            raise DamagedCheckpoint(folder, f"{METADATA} does not describe a checkpoint")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise DamagedCheckpoint(folder, f"{name} is not a tensor but a pickled object")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise DamagedCheckpoint(folder, f"{METADATA} points outside: {info.relative_path}")
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.metadata.storage_meta = self.metadata.storage_meta or StorageMeta()
        self.metadata.storage_meta.load_id = self.load_id
        return self.metadata


def _cause(error: CheckpointException) -> BaseException:
    """The first rank's own error; the wrapper is a BaseException that hides it."""
    return next(iter(error.failures.values()))[0]


def _quiet() -> None:
    """Running without a process group is intended here, and worth no warning each time."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or")
