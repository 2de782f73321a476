"""One file in the format of safetensors, written tensor by tensor.

The format: the length of the header (8 bytes, little-endian), the header (JSON: for each tensor its
number format, shape and place; text under ``__metadata__``), the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scalerun.checkpoint.atomic import replacing
from scalerun.dataclass.errors import UserError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """One tensor of the file."""

    name: str
    template: Tensor
    """Its shape and number format; see :func:`~scalerun.checkpoint.storage.template`."""
    read: Callable[[], Tensor]
    """Makes it; called once, when it is written."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.template.numel() * self.template.element_size()


def write_safetensors(path: Path, entries: Iterable[Entry], metadata: Mapping[str, str]) -> int:
    """Write a file that appears under its name when it is whole; one tensor is held at a time.

    Args:
        entries: in the order in which they are read. Formats of more bytes go first, so that every
            tensor lies at a multiple of its format's bytes.
        metadata: text for whoever reads the header.

    Returns:
        Bytes of the file.

    Raises:
        UserError: a number format has no form in the file, the disk has too little room, or
            reading or writing fails; whatever had the file's name is still there.
    """
    ordered = sorted(entries, key=lambda entry: -entry.template.element_size())
    header = _header(ordered, metadata)
    size = 8 + len(header) + sum(entry.num_bytes for entry in ordered)
    available = shutil.disk_usage(path.parent).free
    if available < size:
        raise UserError(f"{path} needs {size} bytes, and {available} are free; make room")
    try:
        with replacing(path) as stream:
            stream.write(len(header).to_bytes(8, "little"))
            stream.write(header)
            for entry in ordered:
                stream.write(_bytes(entry))
    except OSError as error:
        where = error.filename or path
        raise UserError(f"{where}: {error.strerror or error}; nothing was written") from error
    return size


def _header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for entry in entries:
        dtype = entry.template.dtype
        if dtype not in DTYPES:
            raise UserError(
                f"{entry.name} is stored in {str(dtype).removeprefix('torch.')}, which a file of "
                "safetensors cannot hold; give --dtype"
            )
        assert entry.name not in fields
        fields[entry.name] = {
            "dtype": DTYPES[dtype],
            "shape": list(entry.template.shape),
            "data_offsets": [offset, offset + entry.num_bytes],
        }
        offset += entry.num_bytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % ALIGNMENT)


def _bytes(entry: Entry) -> memoryview:
    tensor = entry.read().detach()
    assert (tensor.shape, tensor.dtype) == (entry.template.shape, entry.template.dtype), entry.name
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
