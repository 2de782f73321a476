import pytest
import torch

from scalerun.checkpoint import averaging
from scalerun.checkpoint.averaging import (
    MeanWeights,
    check_same_tensors,
    newest_checkpoints,
    write_mean,
)
from scalerun.checkpoint.inspection import verify_all
from scalerun.checkpoint.reader import load_tensors, read_state
from scalerun.dataclass.errors import UserError


@pytest.fixture
def save(manager, Box, tmp_path):
    """Save models of these tensors, one run for each, and return the checkpoints."""

    def save(*models):
        folders = []
        for number, model in enumerate(models, start=1):
            made = manager(save_dir=tmp_path / f"run_{number}")
            made.save(number, {"model": Box(model), "trainer": Box({"num_updates": number})})
            made.close()
            folders.append(made.folder.checkpoint(number))
        return folders

    return save


def draw(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_mean_is_that_of_float64_rounded_once(save):
    models = [
        {"w": draw(i, 50, 3) * 10**i, "half": draw(i, 20, dtype=torch.bfloat16)} for i in range(3)
    ]
    mean = MeanWeights(save(*models))
    for name in ("w", "half"):
        exact = torch.stack([m[name].double() for m in models]).mean(0)
        found = mean.read(f"model.{name}")
        assert found.dtype == models[0][name].dtype
        assert torch.equal(found, exact.to(found.dtype)), name


def test_the_mean_of_equal_weights_is_the_weights(save):
    model = {"w": draw(1, 40, 7), "scalar": torch.tensor(0.1)}
    mean = MeanWeights(save(model, model, model))
    assert torch.equal(mean.read("model.w"), model["w"])
    assert torch.equal(mean.read("model.scalar"), model["scalar"])


def test_whole_numbers_have_to_agree(save):
    folders = save({"n": torch.tensor([3])}, {"n": torch.tensor([3])}, {"n": torch.tensor([4])})
    assert MeanWeights(folders[:2]).read("model.n") == 3
    with pytest.raises(UserError, match=r"model\.n holds whole numbers, which differ in .*run_3"):
        MeanWeights(folders).read("model.n")


def test_what_is_written_is_a_checkpoint_like_any_other(save, tmp_path):
    models = [{"a.w": draw(1, 3), "b": draw(2)}, {"a.w": draw(3, 3), "b": draw(4)}]
    plain = {"model": {}, "trainer": {"num_updates": 2}}
    files = {"assets/words.txt": b"the"}
    found = write_mean(tmp_path / "mean", 2, save(*models), plain=plain, run_files=files)
    assert found == tmp_path / "mean/checkpoint_2"
    assert [finding.fault for finding in verify_all(tmp_path / "mean")] == [None]
    assert read_state(found) == plain
    loaded = {"a.w": torch.zeros(3), "b": torch.zeros(())}
    load_tensors(found, {"model": loaded})
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, (models[0][name] + models[1][name]) / 2)


def test_other_names_shapes_or_formats_are_named(save):
    base = {"a": draw(1, 3), "b": draw(2, 2, 2)}
    others = [
        {"a": draw(1, 3)},
        base | {"a": draw(1, 4)},
        base | {"b": draw(2, 2, 2, dtype=torch.float16)},
        base | {"c": draw(1)},
    ]
    first, *rest = save(base, *others)
    check_same_tensors([first, first])
    for folder, message in zip(
        rest,
        [
            r"b is missing, not \(2, 2\) float32",
            r"a is \(4,\) float32, not \(3,\)",
            r"b is \(2, 2\) float16, not",
            r"c is \(\) float32, not missing",
        ],
        strict=True,
    ):
        with pytest.raises(UserError, match=message):
            check_same_tensors([first, folder])


def test_only_the_first_differences_are_listed(save):
    first, second = save({f"w{i}": draw(i, 2) for i in range(9)}, {"w0": draw(0, 2)})
    with pytest.raises(UserError, match=r"w1 is missing.*w3 is missing, not .*; and 5 more"):
        check_same_tensors([first, second])


def test_the_newest_of_a_run_come_oldest_first(saved, tmp_path):
    run = saved(1, 2, 10)
    assert [p.name for p in newest_checkpoints(run, 2)] == ["checkpoint_2", "checkpoint_10"]
    with pytest.raises(UserError, match="has 3 checkpoints, fewer than --last 4"):
        newest_checkpoints(run, 4)
    with pytest.raises(UserError, match="is a checkpoint; --last takes the folder of a run"):
        newest_checkpoints(run / "checkpoint_2", 2)
    with pytest.raises(UserError, match="nowhere does not exist"):
        newest_checkpoints(tmp_path / "nowhere", 2)


def test_too_small_a_disk_and_a_fault_on_the_way_leave_nothing(save, tmp_path, monkeypatch):
    folders = save({"n": torch.tensor([3])}, {"n": torch.tensor([4])})
    with pytest.raises(UserError, match="have no mean"):
        write_mean(tmp_path / "mean", 2, folders, plain={"model": {}}, run_files={})
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(averaging.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"--output .* needs \d+ bytes, and 100 are free"):
        write_mean(tmp_path / "mean", 2, folders, plain={"model": {}}, run_files={})
    assert list((tmp_path / "mean").iterdir()) == []
