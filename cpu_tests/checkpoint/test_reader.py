import logging

import pytest
import torch

from scalerun.checkpoint import reader
from scalerun.checkpoint.checkpoint_folder import CheckpointFolder
from scalerun.checkpoint.manifest import DamagedCheckpoint
from scalerun.dataclass.errors import UserError


def test_a_run_stands_for_its_newest_whole_checkpoint(saved, flip_byte, caplog):
    run = saved(1, 2, 3)
    assert reader.find_checkpoint(run) == run / "checkpoint_3"
    flip_byte(run / "checkpoint_3" / "__0_0.distcp")
    (run / "checkpoint_2" / "state.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert reader.find_checkpoint(run) == run / "checkpoint_1"
    assert caplog.text.count("is left as it is; using checkpoint_1") == 2
    assert "checkpoint_3 is damaged (the content of __0_0.distcp has changed)" in caplog.text


def test_a_checkpoint_and_a_pointer_stand_for_themselves(saved):
    run = saved(1, 2)
    assert reader.find_checkpoint(run / "checkpoint_1") == run / "checkpoint_1"
    (run / "checkpoint_best").write_text("checkpoint_1\n")
    assert reader.find_checkpoint(str(run / "checkpoint_best")) == run / "checkpoint_1"


def test_a_copied_checkpoint_may_have_any_name(saved, tmp_path):
    (saved(4) / "checkpoint_4").rename(tmp_path / "best.model")
    assert reader.find_checkpoint(tmp_path / "best.model") == tmp_path / "best.model"


def test_a_checkpoint_that_was_named_must_be_whole(saved, flip_byte):
    run = saved(1, 2)
    flip_byte(run / "checkpoint_2" / ".metadata")
    with pytest.raises(DamagedCheckpoint, match="checkpoint_2 is damaged"):
        reader.find_checkpoint(run / "checkpoint_2")
    (run / "checkpoint_1" / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"it has no manifest\.json"):
        reader.find_checkpoint(run / "checkpoint_1")


def test_a_run_of_damaged_checkpoints_is_no_fresh_run(saved, flip_byte):
    run = saved(1, 2)
    for number in (1, 2):
        flip_byte(run / f"checkpoint_{number}" / "state.json")
    with pytest.raises(
        UserError, match=r"every checkpoint in .* is damaged \(checkpoint_2: .*move them away to"
    ):
        reader.newest_whole(CheckpointFolder(run))
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged .*; give PATH another"):
        reader.find_checkpoint(run, "PATH")


def test_a_mistyped_path_is_told_what_there_is(saved, tmp_path):
    run = saved(1, 20)
    with pytest.raises(UserError) as error:
        reader.find_checkpoint(run / "checkpoint_2", flag="--restore-file")
    assert "--restore-file" in str(error.value)
    assert "does not exist" in str(error.value)
    assert "checkpoint_20, checkpoint_1, checkpoint_last" in str(error.value)
    with pytest.raises(UserError, match=f"neither does {tmp_path}/nowhere"):
        reader.find_checkpoint(tmp_path / "nowhere" / "checkpoint_2")
    with pytest.raises(UserError, match="holds no checkpoint"):
        reader.find_checkpoint(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match="neither a checkpoint nor the name of one"):
        reader.find_checkpoint(tmp_path / "model.pt")


def test_a_run_without_checkpoints_is_fresh(tmp_path):
    assert reader.newest_whole(CheckpointFolder(tmp_path)) is None
    assert reader.newest_whole(CheckpointFolder(tmp_path / "nowhere")) is None


def test_one_part_can_be_loaded_alone(saved, number_of):
    path = saved(6) / "checkpoint_6"
    weights = {"embed.weight": torch.zeros(7, 5), "scale": torch.zeros(())}
    reader.load_tensors(path, {"model": weights})
    assert (weights["embed.weight"] == 6).all()
    assert reader.read_state(path)["trainer"]["num_updates"] == 6


def test_a_model_that_does_not_fit_is_told_how(saved):
    path = saved(6) / "checkpoint_6"
    model = {"embed.weight": torch.zeros(7, 4), "extra": torch.zeros(2)}
    with pytest.raises(UserError) as error:
        reader.load_tensors(path, {"model": model})
    assert "does not fit the model" in str(error.value)
    assert "model.embed.weight is (7, 5) in the checkpoint, not (7, 4)" in str(error.value)
    assert "model.extra (2,) is not in the checkpoint" in str(error.value)
    assert "model.scale () is only in the checkpoint" in str(error.value)
    assert (model["embed.weight"] == 0).all()


def test_a_misfit_lists_only_the_first_differences(saved):
    path = saved(6) / "checkpoint_6"
    model = {f"layers.{n}.weight": torch.zeros(1) for n in range(20)}
    with pytest.raises(UserError, match="and 19 more"):
        reader.load_tensors(path, {"model": model})


def test_a_file_of_the_run_is_found_or_missed_by_name(saved):
    path = saved(1, run_files={"tokenizer/vocab.json": "{}"}) / "checkpoint_1"
    assert reader.run_file(path, "tokenizer/vocab.json").read_text() == "{}"
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        reader.run_file(path, "config.yaml")
