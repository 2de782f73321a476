import errno
import io
import os
import pickle
import resource
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from scalerun.checkpoint import storage
from scalerun.checkpoint.atomic import hash_file
from scalerun.checkpoint.manifest import DamagedCheckpoint

TENSORS = {
    "model": {
        "a": torch.randn(3, 4),
        "b.c": torch.randn(2, 3).to(torch.bfloat16),
        "transposed": torch.randn(4, 6).t(),
        "slice": torch.randn(10, 10)[2:5, 3:7],
    },
    "optimizer": {"step": torch.tensor(7.0), "count": torch.arange(5)},
}


def flat(tree):
    return {f"{part}.{name}": t for part, inner in tree.items() for name, t in inner.items()}


def blank(tree):
    return {name: torch.zeros_like(t) for name, t in flat(tree).items()}


def test_tensors_come_back_to_the_bit(tmp_path):
    storage.save_tensors(tmp_path / "c", TENSORS)
    loaded = blank(TENSORS)
    storage.load_tensors_into(tmp_path / "c", loaded)
    for name, tensor in flat(TENSORS).items():
        assert torch.equal(loaded[name], tensor), name


def test_each_tensor_can_be_read_alone(tmp_path):
    storage.save_tensors(tmp_path / "c", TENSORS)
    stored = storage.StoredTensors(tmp_path / "c")
    assert stored.parts() == ["model", "optimizer"]
    for part, inner in TENSORS.items():
        found = stored.templates(part)
        assert found.keys() == inner.keys()
        for name, tensor in inner.items():
            assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
            assert found[name].untyped_storage().nbytes() == tensor.element_size()
            assert torch.equal(stored.read(f"{part}.{name}"), tensor)


def test_tensors_that_are_made_one_by_one_are_saved_alike(tmp_path):
    """Each is made once, at the moment it is written, and let go before the next but one."""
    alive = []
    made = []

    def make(name):
        assert sum(array() is not None for array in alive) <= 1
        made.append(name)
        array = np.full(3, len(made), dtype=np.float32)
        alive.append(weakref.ref(array))
        return torch.from_numpy(array)

    wanted = {f"w{i}": storage.template(torch.Size([3]), torch.float32) for i in range(5)}
    records = storage.save_one_by_one(tmp_path / "c", {"model": wanted}, make)
    for name, record in records.items():
        assert record.sha256 == hash_file(tmp_path / "c" / name)
    assert {p.name for p in (tmp_path / "c").iterdir()} == set(records)
    assert sorted(made) == [f"model.w{i}" for i in range(5)]
    loaded = {name: torch.zeros(3) for name in made}
    storage.load_tensors_into(tmp_path / "c", loaded)
    for number, name in enumerate(made, start=1):
        assert loaded[name].tolist() == [number] * 3


def test_an_error_while_a_tensor_is_made_is_the_one_that_is_raised(tmp_path):
    def make(name):
        raise DamagedCheckpoint(tmp_path, f"no {name}")

    wanted = {"w": storage.template(torch.Size([3]), torch.float32)}
    with pytest.raises(DamagedCheckpoint, match=r"no model\.w"):
        storage.save_one_by_one(tmp_path / "c", {"model": wanted}, make)


def test_records_are_those_of_the_files(tmp_path):
    records = storage.save_tensors(tmp_path / "c", TENSORS)
    assert {p.name for p in (tmp_path / "c").iterdir()} == set(records)
    for name, record in records.items():
        assert record.sha256 == hash_file(tmp_path / "c" / name)


def test_torchs_own_tools_read_the_folder(tmp_path):
    storage.save_tensors(tmp_path / "c", TENSORS)
    loaded = {
        part: {n: torch.zeros_like(t) for n, t in inner.items()} for part, inner in TENSORS.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, checkpoint_id=tmp_path / "c")
    assert torch.equal(loaded["model"]["a"], TENSORS["model"]["a"])


def test_saving_and_loading_is_quiet(tmp_path, recwarn, capfd):
    storage.save_tensors(tmp_path / "c", TENSORS)
    storage.load_tensors_into(tmp_path / "c", blank(TENSORS))
    assert [str(w.message) for w in recwarn] == []
    assert capfd.readouterr() == ("", "")


def test_shapes_are_known_without_reading_tensors(tmp_path):
    storage.save_tensors(tmp_path / "c", TENSORS)
    assert storage.read_shapes(tmp_path / "c") == {n: t.shape for n, t in flat(TENSORS).items()}


def test_a_loaded_tensor_keeps_the_type_of_its_place(tmp_path):
    storage.save_tensors(tmp_path / "c", {"model": {"a": torch.tensor([1.0, 2.0])}})
    place = torch.zeros(2, dtype=torch.bfloat16)
    storage.load_tensors_into(tmp_path / "c", {"model.a": place})
    assert place.tolist() == [1.0, 2.0]


def test_a_staged_copy_does_not_follow_the_original():
    original = {"model": {"a": torch.ones(3), "step": torch.tensor(1.0)}}
    copy = storage.stage(original)
    original["model"]["a"].zero_()
    original["model"]["step"].zero_()
    assert copy["model"]["a"].tolist() == [1, 1, 1]
    assert copy["model"]["step"].item() == 1


def test_room_is_asked_for_generously(tmp_path):
    tensors = {"p": {str(n): torch.zeros(n) for n in range(50)}}
    records = storage.save_tensors(tmp_path / "c", tensors)
    used = sum(record.size for record in records.values())
    assert used <= storage.bytes_needed(flat(tensors)) <= used + 50 * storage.BYTES_PER_TENSOR


class Evil:
    def __reduce__(self):
        return (os.system, ("touch owned",))


@pytest.mark.parametrize("content", [Evil(), {"a": Evil()}, [1], os.getcwd])
def test_an_index_with_foreign_objects_is_refused_and_not_executed(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    storage.save_tensors(tmp_path / "c", TENSORS)
    (tmp_path / "c" / storage.METADATA).write_bytes(pickle.dumps(content))
    with pytest.raises(DamagedCheckpoint, match="metadata"):
        storage.read_shapes(tmp_path / "c")
    assert not (tmp_path / "owned").exists()


def test_a_pickled_object_among_the_tensors_is_refused(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"a": torch.ones(1), "b": {1, 2}}}, checkpoint_id=tmp_path / "c")
    with pytest.raises(DamagedCheckpoint, match=r"model\.b is not a tensor"):
        storage.load_tensors_into(tmp_path / "c", {"model.a": torch.zeros(1)})


def test_an_index_that_points_outside_the_folder_is_refused(tmp_path):
    storage.save_tensors(tmp_path / "c", TENSORS)
    path = tmp_path / "c" / storage.METADATA
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../_0.distcp"))
    with pytest.raises(DamagedCheckpoint, match="points outside"):
        storage.read_shapes(tmp_path / "c")


def test_a_write_that_fails_gives_the_systems_own_error(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="large") as error:
            storage.save_tensors(tmp_path / "c", {"model": {"a": torch.zeros(200_000)}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.errno == errno.EFBIG


def test_getattr_in_an_index_reaches_enum_members_only():
    """Early releases of Python 3.11 pickle enum members through it."""
    member = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    found = storage._MetadataUnpickler(
        io.BytesIO(member + b"S'TORCH_CONTIGUOUS_FORMAT'\ntR.")
    ).load()
    assert found.name == "TORCH_CONTIGUOUS_FORMAT"
    with pytest.raises(pickle.UnpicklingError, match="not allowed"):
        storage._MetadataUnpickler(io.BytesIO(member + b"S'__class__'\ntR.")).load()
