import os

import pytest

from scalerun.cli.output_file import (
    prepare_new_file,
    prepare_output_file,
    prepare_output_files,
    refuse_full_folder,
)
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


def test_two_outputs_are_two_files(tmp_path):
    one, same = str(tmp_path / "a"), str(tmp_path / "b/../a")
    (tmp_path / "b").mkdir()
    prepare_output_files({"--x": one, "--y": None}, inputs=[])
    with pytest.raises(UserError, match="^--x and --y are both .*; name two files$"):
        prepare_output_files({"--x": one, "--y": same}, inputs=[])


def test_an_input_is_not_written_over(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    source, new = data / "train.en", data / "new"
    source.write_text("text")
    prepare_output_files({"--x": str(new)}, inputs=[str(data), None])
    for inputs in ([str(source)], [str(data)]):
        with pytest.raises(UserError, match="^--x .*train.en is a file that this command reads"):
            prepare_output_files({"--x": str(source)}, inputs=inputs)
    assert source.read_text() == "text"
