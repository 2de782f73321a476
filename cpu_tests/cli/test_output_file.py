import os

import pytest

from scalerun.cli.output_file import prepare_new_file, prepare_output_file, refuse_full_folder
from scalerun.dataclass.errors import UserError


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path):
    file = tmp_path / "scores.json"
    prepare_output_file("--json", file)
    assert not file.exists()
    file.write_text("old")
    prepare_output_file("--json", file)
    assert file.read_text() == "old"


def test_a_missing_folder_is_made(tmp_path):
    prepare_output_file("--json", tmp_path / "new/folder/scores.json")
    (tmp_path / "new/folder/scores.json").write_text("new")


@pytest.mark.parametrize(
    ("name", "reason"), [(".", "is a folder; name"), ("file/x.json", "cannot be written: File exi")]
)
def test_a_file_that_cannot_be_written_is_refused(tmp_path, name, reason):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"--json .* {reason}"):
        prepare_output_file("--json", tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UserError, match="permission denied"):
        prepare_output_file("--json", tmp_path / "locked/x.json")


def test_a_file_that_is_there_is_replaced_on_demand_alone(tmp_path):
    file = tmp_path / "w.safetensors"
    prepare_new_file("--output", file, force=False)
    file.write_text("old")
    with pytest.raises(UserError, match=r"--output .* exists; give --force to replace it"):
        prepare_new_file("--output", file, force=False)
    prepare_new_file("--output", file, force=True)
    assert file.read_text() == "old"


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    refuse_full_folder("--output", tmp_path / "new")
    refuse_full_folder("--output", tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"--output .* is not empty; name a new folder"):
        refuse_full_folder("--output", tmp_path)
    with pytest.raises(UserError, match=r"--output .*notes\.txt is a file; name a folder"):
        refuse_full_folder("--output", tmp_path / "notes.txt")
