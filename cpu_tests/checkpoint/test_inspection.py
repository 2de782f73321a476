import random
import shutil

import pytest
import torch

from scalerun.checkpoint.inspection import inspect_checkpoint, verify_all
from scalerun.checkpoint.manifest import DamagedCheckpoint
from scalerun.dataclass.errors import UserError

RUN_FILES = {"config.json": '{"lr": 1e-5}\n', "assets/words.txt": "the cat\n"}


@pytest.fixture
def run(saved):
    return saved(1, 2, run_files=RUN_FILES)


def test_a_checkpoint_is_described_without_reading_its_tensors(run, flip_byte):
    flip_byte(run / "checkpoint_2/__0_0.distcp")
    found = inspect_checkpoint(run)
    assert found.path == run / "checkpoint_2"
    assert (found.manifest.num_updates, found.manifest.world_size) == (2, 1)
    assert found.parts == ["model", "optimizer", "trainer"]
    model = {t.name: (t.shape, t.dtype, t.numel, t.num_bytes) for t in found.tensors["model"]}
    assert model == {
        "embed.weight": (torch.Size([7, 5]), torch.float32, 35, 140),
        "scale": (torch.Size([]), torch.float32, 1, 4),
    }
    assert [t.name for t in found.tensors["optimizer"]] == ["embed.weight.exp_avg"]
    assert found.epoch is None


def test_the_epoch_is_that_of_the_place_in_the_data(manager, state_at, Box):
    state = state_at(1) | {"loader": Box({"epoch": 3})}
    made = manager()
    made.save(1, state)
    made.save(2, state, epoch_end=2)
    made.close()
    assert inspect_checkpoint(made.folder.checkpoint(1)).epoch == 3
    assert inspect_checkpoint(made.folder.checkpoint(2)).epoch == 2


def test_a_state_that_is_no_json_is_damage(run):
    path = run / "checkpoint_2/state.json"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(DamagedCheckpoint, match=r"state\.json is not whole"):
        inspect_checkpoint(run)


def test_a_run_that_is_whole_has_a_line_for_each_checkpoint(run):
    findings = list(verify_all(run))
    assert [f.path.name for f in findings] == ["checkpoint_1", "checkpoint_2"]
    assert all(f.fault is None and f.manifest is not None for f in findings)
    assert [f.path for f in verify_all(run / "checkpoint_last")] == [run / "checkpoint_2"]
    assert [f.path for f in verify_all(run / "checkpoint_1")] == [run / "checkpoint_1"]


def test_one_flipped_bit_anywhere_in_any_file_is_found(manager, state_at, tmp_path):
    """Each kind of file, at many random places; the metric's last digits are places too."""
    made = manager(run_files=RUN_FILES)
    made.save(4, state_at(4), metric=1 / 3)
    made.close()
    folder = made.folder.checkpoint(4)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(files) == 6
    draw = random.Random(1)
    for path in files:
        content = path.read_bytes()
        for place in draw.sample(range(8 * len(content)), 20):
            flipped = bytearray(content)
            flipped[place // 8] ^= 1 << place % 8
            path.write_bytes(flipped)
            [finding] = verify_all(folder)
            assert finding.fault is not None, (path.name, place)
        path.write_bytes(content)
    assert [f.fault for f in verify_all(folder)] == [None]


def test_damage_in_one_checkpoint_says_nothing_of_the_others(run, flip_byte):
    flip_byte(run / "checkpoint_1/assets/words.txt")
    first, second = verify_all(run)
    assert first.fault == "the content of assets/words.txt has changed"
    assert second.fault is None


def test_a_checkpoint_that_a_run_removes_meanwhile_is_no_fault(run):
    findings = verify_all(run)
    assert next(findings).path.name == "checkpoint_1"
    shutil.rmtree(run / "checkpoint_2")
    (run / "checkpoint_last").unlink()
    assert list(findings) == []


def test_a_pointer_to_nothing_is_a_fault(run):
    (run / "checkpoint_best").write_text("checkpoint_9\n")
    assert [f.fault for f in verify_all(run)] == [
        None,
        None,
        "it names checkpoint_9, which is not there",
    ]
    with pytest.raises(UserError, match="neither a checkpoint nor the name of one"):
        next(verify_all(run / "checkpoint_best"))


def test_a_folder_without_checkpoints_is_an_error(tmp_path, run):
    with pytest.raises(UserError, match="PATH .* holds no checkpoint"):
        next(verify_all(tmp_path))
    with pytest.raises(UserError, match="PATH .* does not exist"):
        next(verify_all(tmp_path / "nowhere"))
    shutil.rmtree(run / "checkpoint_1")
    assert len(list(verify_all(run))) == 1
