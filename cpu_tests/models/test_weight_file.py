from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from scalerun.dataclass.errors import UserError
from scalerun.models.weight_file import read_weight_file

STATE = {"layer.weight": torch.arange(6.0).reshape(2, 3)}


class Trap:
    """Makes a folder when it is unpickled by executing what it says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def saved(folder: Path, content: Any, **options: Any) -> Path:
    torch.save(content, folder / "file.pt", **options)
    return folder / "file.pt"


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "legacy"])
def test_a_state_dict_is_read(tmp_path: Path, archive: bool) -> None:
    file = read_weight_file(saved(tmp_path, STATE, _use_new_zipfile_serialization=archive))
    torch.testing.assert_close(file.state, STATE)
    assert file.record is None


def test_a_safetensors_file_is_read(tmp_path: Path) -> None:
    module = pytest.importorskip("safetensors.torch")
    module.save_file(STATE, tmp_path / "file.safetensors")
    torch.testing.assert_close(read_weight_file(tmp_path / "file.safetensors").state, STATE)


def test_a_missing_safetensors_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    (tmp_path / "file.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="needs the package safetensors; install it"):
        read_weight_file(tmp_path / "file.safetensors")


def test_a_checkpoint_of_fairseq_gives_weights_and_the_models_settings(tmp_path: Path) -> None:
    settings = {"_name": "lm_base", "dropout": 0.1}
    content = {"model": STATE, "cfg": {"model": settings, "task": {"seed": 1}}, "extra_state": {}}
    file = read_weight_file(saved(tmp_path, content))
    torch.testing.assert_close(file.state, STATE)
    assert file.record == settings


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "legacy"])
@pytest.mark.parametrize("place", ["args", "cfg"])
def test_a_namespace_is_read_on_request_alone(tmp_path: Path, archive: bool, place: str) -> None:
    namespace = argparse.Namespace(dropout=0.1)
    content = {"model": STATE, place: {"model": namespace} if place == "cfg" else namespace}
    path = saved(tmp_path, content, _use_new_zipfile_serialization=archive)
    with pytest.raises(UserError, match="--allow-namespace"):
        read_weight_file(path)
    assert read_weight_file(path, allow_namespace=True).record == {"dropout": 0.1}
    # The permission ends with the call.
    with pytest.raises(UserError, match="--allow-namespace"):
        read_weight_file(path)


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "legacy"])
@pytest.mark.parametrize("allow", [True, False])
def test_nothing_in_a_file_is_executed(tmp_path: Path, archive: bool, allow: bool) -> None:
    trace = tmp_path / "trace"
    content = {"model": STATE, "args": argparse.Namespace(trap=Trap(trace))}
    path = saved(tmp_path, content, _use_new_zipfile_serialization=archive)
    with pytest.raises(UserError):
        read_weight_file(path, allow_namespace=allow)
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists()  # so the trap works


def test_foreign_classes_are_named(tmp_path: Path) -> None:
    path = saved(tmp_path, {"model": torch.nn.Linear(1, 1)})
    with pytest.raises(UserError, match=r"names torch\.nn\.modules\.linear\.Linear"):
        read_weight_file(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list and no state dict"),
        ({"weight": 3}, "'weight' is of type int"),
        ({"weight": torch.ones(2, dtype=torch.int8)}, "has weight in int8"),
        ({}, "holds no weights"),
    ],
)
def test_other_content_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_weight_file(saved(tmp_path, content))


DAMAGED = ["cut.pt", "half.pt", "junk.pt", "empty.pt", "cut.safetensors", "zip.pt"]


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    whole = saved(tmp_path, STATE).read_bytes()
    contents = {
        "cut": whole[:-1],
        "half": whole[: len(whole) // 2],
        "junk": b"hello",
        "empty": b"",
        "zip": whole.replace(b"data.pkl", b"dota.pkl"),
    }
    path = tmp_path / name
    path.write_bytes(contents[path.stem])
    with pytest.raises(UserError, match=f"{name} is damaged or no weight file: "):
        read_weight_file(path)


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "legacy"])
def test_a_file_that_was_cut_anywhere_is_refused(tmp_path: Path, archive: bool) -> None:
    path = saved(tmp_path, STATE, _use_new_zipfile_serialization=archive)
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"file\.pt is damaged or no weight file: "):
            read_weight_file(path)


def test_a_flipped_bit_in_an_archive_changes_no_weight_in_silence(tmp_path: Path) -> None:
    path = saved(tmp_path, STATE)
    whole = path.read_bytes()
    data = whole.index(STATE["layer.weight"].numpy().tobytes())

    def flip(place: int) -> None:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])

    for place in (data, data + 23):
        flip(place)
        with pytest.raises(UserError, match=r"file\.pt is damaged .* the checksum of its part"):
            read_weight_file(path)
    for place in range(0, len(whole), 29):
        flip(place)
        with suppress(UserError):
            torch.testing.assert_close(read_weight_file(path).state, STATE, rtol=0, atol=0)


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_weight_file(tmp_path / "none.pt")
    with pytest.raises(UserError, match="is a folder"):
        read_weight_file(tmp_path)
