import pytest

from cpu_tests.binarised import verse_folder
from scalerun.data.binarised.binarised_layout import find_binarised_sets, find_prefixes
from scalerun.dataclass.errors import UserError


@pytest.fixture
def folder(tmp_path):
    return str(verse_folder(tmp_path / "data"))


def names(prefixes):
    return [prefix.name for prefix in prefixes]


def test_numbered_files_continue_a_set_until_a_number_is_missing(folder, tmp_path):
    for name in ("train3", "train11"):
        (tmp_path / f"data/{name}.bin").touch()
    assert names(find_prefixes(folder, "train", whole=True)) == ["train", "train1"]
    assert names(find_prefixes(folder, "train", whole=False)) == ["train"]
    assert names(find_prefixes(folder, "train1", whole=True)) == ["train1"]
    assert names(find_prefixes(folder, "train1", whole=False)) == ["train1"]


def test_each_numbered_set_is_validated_by_itself(folder):
    assert find_binarised_sets(folder, ["valid"]) == ["valid", "valid1"]
    assert find_binarised_sets(folder, ["valid1", "valid"]) == ["valid1", "valid"]
    assert find_binarised_sets(folder, ["train"]) == ["train", "train1"]


def test_valid_may_be_absent_and_nothing_else(folder, tmp_path):
    for path in (tmp_path / "data").glob("valid*"):
        path.unlink()
    assert find_binarised_sets(folder, ["valid"]) == []
    with pytest.raises(UserError, match="--valid-subset test is not in .*; sets there: train, tra"):
        find_binarised_sets(folder, ["test"])
    with pytest.raises(UserError, match=r"has no test\.idx and test\.bin; sets there: train, tra"):
        find_prefixes(folder, "test", whole=True)
