import pytest

from scalerun.dataclass.errors import UserError
from scalerun.models.metaseq.files import find_files


@pytest.fixture
def folder(tmp_path):
    for name in ("a", "a-shard0", "a-shard1", "b-model_part-0", "b-model_part-1", "c.pt.d-shard0"):
        (tmp_path / f"{name}.pt").touch()
    return tmp_path


def names(found):
    return [[path.name for path in row] for row in found]


def test_a_file_without_ranks_is_the_checkpoint(folder):
    assert names(find_files(folder / "a.pt")) == [["a.pt"]]


def test_data_parallel_ranks_are_columns_and_tensor_ranks_rows(folder):
    assert names(find_files(folder / "a-shard1.pt")) == [["a-shard0.pt", "a-shard1.pt"]]
    rows = [["b-model_part-0.pt"], ["b-model_part-1.pt"]]
    assert names(find_files(folder / "b.pt")) == rows
    assert names(find_files(folder / "b-model_part-0.pt")) == rows


def test_a_name_may_hold_what_ends_one(folder):
    assert names(find_files(folder / "c.pt.d.pt")) == [["c.pt.d-shard0.pt"]]


def test_a_gap_is_named(folder):
    (folder / "b-model_part-3.pt").touch()
    with pytest.raises(UserError, match="lacks the file of tensor rank 2 and data-parallel rank 0"):
        find_files(folder / "b.pt")


def test_other_files_are_refused(folder):
    with pytest.raises(UserError, match="does not end in .pt"):
        find_files(folder / "a.bin")
