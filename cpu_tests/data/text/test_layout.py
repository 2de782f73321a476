import logging
import os

import pytest

from scalerun.data.text.layout import TextFile, find_sets, find_split
from scalerun.dataclass.errors import UserError


@pytest.fixture
def touch(tmp_path):
    def touch(*names):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        return tmp_path

    return touch


def names(split):
    return [[file.name for file in shard] for shard in split.shards]


def test_shards_are_sorted_as_numbers_and_files_by_name(touch):
    data = touch("train/10/a.jsonl", "train/2/b.jsonl", "train/2/a.jsonl.gz", "train/0/a.jsonl.zst")
    assert names(find_split(data, "train")) == [
        ["train/0/a.jsonl.zst"],
        ["train/2/a.jsonl.gz", "train/2/b.jsonl"],
        ["train/10/a.jsonl"],
    ]


@pytest.mark.parametrize("folder", ["", "train/"])
def test_files_without_shard_folders_are_one_shard(touch, folder):
    data = touch(f"{folder}b.txt", f"{folder}a.jsonl", f"{folder}c.JSONL.GZ")
    expected = [[f"{folder}a.jsonl", f"{folder}b.txt", f"{folder}c.JSONL.GZ"]]
    assert names(find_split(data, "train")) == expected


def test_a_corpus_is_a_file_name_without_its_ending(touch):
    data = touch("a.b.jsonl", "web.jsonl.gz", "book.TXT", "x.jsonl.zst")
    assert find_split(data, "train").corpora == ["a.b", "book", "web", "x"]
    assert TextFile(data / "book.TXT", "book.TXT").suffix == ".txt"


def test_strays_are_named_in_one_line_and_never_abort(touch, caplog):
    data = touch(
        "train/0/a.jsonl", "train/0/.DS_Store", "train/0/notes.md", "train/.ipynb_checkpoints/x",
        "train/README", "train/7/empty.md", "train/late.jsonl",
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        assert names(find_split(data, "train")) == [["train/0/a.jsonl"]]
    assert [record.getMessage() for record in caplog.records] == [
        f"not used in {data}/train: .ipynb_checkpoints, 7, README, late.jsonl",
        f"not used in {data}/train/0: .DS_Store, notes.md",
    ]


@pytest.mark.parametrize("below", ["train/0", "train", "."])
def test_what_looks_like_text_and_cannot_be_read_is_warned_about(touch, caplog, below):
    data = touch(f"{below}/a.jsonl", f"{below}/.hidden.jsonl")
    (data / below / "gone.jsonl").symlink_to("nowhere.jsonl")
    os.mkfifo(data / below / "pipe.jsonl.gz")
    assert names(find_split(data, "train")) == [[f"{below}/a.jsonl".removeprefix("./")]]
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"{data / below / 'gone.jsonl'} is not read: it is a link to nowhere.jsonl, which is not "
        "there",
        f"{data / below / 'pipe.jsonl.gz'} is not read: it is a pipe or another special file",
    ]


def test_missing_shard_numbers_are_noted(touch, caplog):
    data = touch("train/0/a.jsonl", "train/3/a.jsonl")
    with caplog.at_level(logging.INFO):
        assert len(find_split(data, "train").shards) == 2
    assert caplog.messages[-1].endswith("run from 0 to 3; 2 of them are missing")


def test_shard_numbers_may_lie_far_apart(touch):
    """Time stamps, say: nothing counts from one to the next."""
    data = touch("train/0/a.jsonl", "train/99999999999999999999/a.jsonl")
    assert len(find_split(data, "train").shards) == 2


def test_a_name_stands_for_all_sets_below_it(touch):
    data = touch(
        "train/0/a.jsonl", "valid/wiki/00/a.jsonl", "valid/news/a.jsonl", "valid/none/x.md",
        "valid/2020/0/a.jsonl", "other/0/a.jsonl", "valid/.hidden/0/a.jsonl",
    )  # fmt: skip
    assert find_sets(data, ["valid"]) == ["valid/2020", "valid/news", "valid/wiki"]
    assert find_sets(data, ["valid/wiki", "other", "valid"]) == [
        "valid/wiki", "other", "valid/2020", "valid/news",
    ]  # fmt: skip


def test_a_set_may_have_its_files_directly_in_it(touch):
    data = touch("a.jsonl", "valid/a.jsonl", "valid/more/0/a.jsonl")
    assert find_sets(data, ["valid"]) == ["valid", "valid/more"]
    assert names(find_split(data, "valid")) == [["valid/a.jsonl"]]


def test_validation_is_optional_only_by_its_default_name(touch):
    data = touch("a.jsonl")
    assert find_sets(data, ["valid"]) == []
    with pytest.raises(UserError, match="has no validation sets"):
        find_sets(data, ["valid/wiki"])


@pytest.mark.parametrize("name", ["valid/wikis", "wiki", "valid/wiki/00"])
def test_a_set_that_is_not_there_is_refused_with_those_that_are(touch, name):
    data = touch("train/0/a.jsonl", "valid/wiki/00/a.jsonl", "valid/news/0/a.jsonl")
    if name == "valid/wiki/00":  # a shard alone can be scored
        assert find_sets(data, [name]) == [name]
        return
    with pytest.raises(UserError, match=r"sets there: valid/news, valid/wiki$"):
        find_sets(data, [name])
    with pytest.raises(UserError, match="sets there"):
        find_split(data, name)


def test_the_training_text_can_be_named_in_every_layout(touch):
    data = touch("a.jsonl")
    assert find_sets(data, ["train"]) == ["train"]
    data = touch("train/0/a.jsonl")
    assert find_sets(data, ["train/"]) == ["train"]


def test_a_part_that_is_held_out_is_the_set_valid(touch):
    data = touch("a.jsonl")
    assert find_sets(data, ["valid", "train"], held_out=True) == ["valid", "train"]


def test_an_empty_validation_folder_is_refused(touch):
    data = touch("a.jsonl", "valid/x.md")
    with pytest.raises(UserError, match="--valid-subset valid is not in"):
        find_sets(data, ["valid"])


def test_a_missing_folder_and_a_file_are_refused(touch):
    data = touch("a.jsonl")
    with pytest.raises(UserError, match="nowhere does not exist"):
        find_split(data / "nowhere", "train")
    with pytest.raises(UserError, match="is a file; give a folder"):
        find_split(data / "a.jsonl", "train")


def test_a_relative_folder_that_is_missing_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    says = rf"the data folder nowhere \({tmp_path}/nowhere\) does not exist"
    with pytest.raises(UserError, match=says):
        find_split("nowhere", "train")


def test_a_folder_without_text_is_refused_with_what_it_holds(touch):
    data = touch("a.csv", "b.parquet")
    with pytest.raises(UserError, match=r"found a\.csv, b\.parquet; expected \.jsonl"):
        find_split(data, "train")
    touch("train/notes.md")
    with pytest.raises(UserError, match=r"train holds no text files; found notes\.md"):
        find_split(data, "train")


def test_no_data_folder_is_not_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match="the data folder is missing"):
        find_split("", "train")
