import functools
import json
import weakref

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from scalerun.checkpoint import safetensors_file
from scalerun.checkpoint.safetensors_file import DTYPES, Entry, write_safetensors
from scalerun.checkpoint.storage import template
from scalerun.dataclass.errors import UserError


def entries_of(tensors):
    return [
        Entry(name, template(t.shape, t.dtype), functools.partial(tensors.get, name))
        for name, t in tensors.items()
    ]


def test_every_format_and_shape_comes_back_bit_for_bit(tmp_path):
    bits = torch.randint(0, 256, (48,), dtype=torch.uint8, generator=torch.manual_seed(1))
    tensors = {
        str(dtype): (bits % 2).bool() if dtype == torch.bool else bits.view(dtype)
        for dtype in DTYPES
    }
    tensors |= {
        "odd": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
    }
    path = tmp_path / "w.safetensors"
    size = write_safetensors(path, entries_of(tensors), {"origin": "here"})
    assert size == path.stat().st_size
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape), name
        ours, theirs = (
            t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, loaded[name])
        )
        assert torch.equal(ours, theirs), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "origin": "here"}


def test_every_tensor_lies_at_a_multiple_of_its_formats_bytes(tmp_path):
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(5), "c": torch.ones(2).half()}
    write_safetensors(tmp_path / "w.safetensors", entries_of(tensors), {})
    content = (tmp_path / "w.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, tensor in tensors.items():
        start = 8 + length + header[name]["data_offsets"][0]
        assert start % tensor.element_size() == 0


def test_one_tensor_is_made_at_a_time_in_the_order_given(tmp_path):
    made, memory = [], []

    def make(number):
        made.append(number)
        # The one before is let go when this one is there.
        assert sum(array() is not None for array in memory) <= 1
        array = np.full(2, number, dtype=np.float32)
        memory.append(weakref.ref(array))
        return torch.from_numpy(array)

    entries = [
        Entry(str(n), template(torch.Size([2]), torch.float32), functools.partial(make, n))
        for n in range(5)
    ]
    write_safetensors(tmp_path / "w.safetensors", entries, {})
    assert made == list(range(5))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("no such tensor"), "no such tensor"),
        (
            OSError(28, "No space left on device"),
            r"w\.safetensors: No space left on device; nothing",
        ),
        (
            PermissionError(13, "Permission denied", "__0_0.distcp"),
            "__0_0.distcp: Permission denied",
        ),
    ],
)
def test_an_error_on_the_way_leaves_the_old_file(tmp_path, error, message):
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"old")

    def fail():
        raise error

    with pytest.raises(UserError, match=message):
        write_safetensors(path, [Entry("a", torch.ones(2), fail)], {})
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.safetensors"]


def test_what_the_format_cannot_hold_is_refused(tmp_path):
    with pytest.raises(UserError, match="z is stored in complex64"):
        write_safetensors(
            tmp_path / "w.safetensors", entries_of({"z": torch.ones(1, dtype=torch.complex64)}), {}
        )


def test_a_full_disk_is_noticed_before_writing(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(safetensors_file.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"needs \d+ bytes, and 100 are free"):
        write_safetensors(tmp_path / "w.safetensors", entries_of({"a": torch.ones(50)}), {})
    assert list(tmp_path.iterdir()) == []
