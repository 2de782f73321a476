import pytest

from scalerun.checkpoint.checkpoint_folder import LAST, CheckpointFolder, read_pointer
from scalerun.dataclass.errors import UserError


def test_only_folders_with_a_number_are_checkpoints_newest_first(tmp_path):
    for name in ("checkpoint_9", "checkpoint_10", "checkpoint_x", "checkpoint_8.damaged", "cache"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint_11").write_text("a file")
    found = CheckpointFolder(tmp_path).checkpoints()
    assert [number for number, _ in found] == [10, 9]
    assert CheckpointFolder(tmp_path / "nowhere").checkpoints() == []


def test_what_a_killed_save_left_is_cleared_and_nothing_else(tmp_path):
    left = [".checkpoint_5.123.tmp", ".checkpoint_4.99.old"]
    kept = ["checkpoint_3", "checkpoint_3.damaged", ".checkpoints", "cache"]
    for name in left + kept:
        (tmp_path / name / "inner").mkdir(parents=True)
    (tmp_path / ".checkpoint_last.123.tmp").write_text("checkpoint_5")
    CheckpointFolder(tmp_path).open_for_writing()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(kept)


def test_a_damaged_checkpoint_is_moved_aside_never_deleted(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for content in ("first", "second", "third"):
        temporary = folder.temporary(7)
        temporary.mkdir()
        (temporary / "f").write_text(content)
        folder.commit(temporary, 7)
    texts = {e.name: (e / "f").read_text() for e in tmp_path.iterdir()}
    assert texts == {
        "checkpoint_7": "third",
        "checkpoint_7.damaged": "first",
        "checkpoint_7.damaged.2": "second",
    }


def test_a_pointer_holds_the_name_of_a_folder(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.point(LAST, 5)
    folder.point(LAST, 12)
    assert (tmp_path / LAST).read_text() == "checkpoint_12\n"
    assert read_pointer(tmp_path / LAST) == "checkpoint_12"


@pytest.mark.parametrize("content", [b"", b"\n", b"../elsewhere\n", b"/etc\n", b"\xff\xff"])
def test_a_pointer_never_leads_out_of_the_run(tmp_path, content):
    (tmp_path / LAST).write_bytes(content)
    assert read_pointer(tmp_path / LAST) is None


def test_a_run_folder_that_cannot_be_made_is_an_error_of_the_user(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--save-dir .*file/run cannot be written"):
        CheckpointFolder(tmp_path / "file" / "run").open_for_writing()


def test_removing_leaves_no_half_of_a_checkpoint(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    (tmp_path / "checkpoint_1").mkdir()
    monkeypatch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        folder.remove(1)
    assert folder.checkpoints() == []
