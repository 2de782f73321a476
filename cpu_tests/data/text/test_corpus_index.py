import json

import pytest

from cpu_tests.masked_data import write_index
from scalerun.data.text.corpus_index import find_indices, read_index, training_split, whole_split
from scalerun.dataclass.errors import UserError


@pytest.fixture
def data(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("text\n")
    return tmp_path


def entry(*sources, **rest):
    return {"source": list(sources), "source_lang": "en", **rest}


def test_an_index_lists_corpora(data):
    write_index(data, "train", [entry("a.txt", "b.txt", weight=2), entry("c.txt", count=1)])
    first, second = read_index(data, "train")
    assert (first.name, first.weight, second.name, second.weight) == ("en", 2.0, "en-2", 1.0)
    assert [file.path for file in first.files] == [data / "a.txt", data / "b.txt"]


def test_each_training_shard_has_all_corpora(data):
    write_index(data, "train", [entry("a.txt", "b.txt", weight=2), entry("c.txt", weight=1)])
    split, mixture = training_split(read_index(data, "train"), "train")
    names = [[(file.name, file.corpus) for file in shard] for shard in split.shards]
    assert names == [[("a.txt", "en"), ("c.txt", "en-2")], [("b.txt", "en"), ("c.txt", "en-2")]]
    assert mixture.weights == {"en": 2.0, "en-2": 1.0}


def test_validation_reads_each_file_once(data):
    write_index(data, "valid", [entry("a.txt", "b.txt", weight=2), entry("c.txt", weight=1)])
    split = whole_split(read_index(data, "valid"), "valid")
    assert [[file.name for file in shard] for shard in split.shards] == [
        ["a.txt"], ["b.txt"], ["c.txt"],
    ]  # fmt: skip


def test_one_corpus_needs_no_weight_and_is_read_as_it_is(data):
    write_index(data, "train", [entry("a.txt")])
    assert training_split(read_index(data, "train"), "train")[1].is_plain


def test_weight_zero_leaves_a_corpus_out(data):
    write_index(data, "train", [entry("a.txt", weight=0), entry("b.txt", weight=0.5)])
    [corpus] = read_index(data, "train")
    assert corpus.files[0].name == "b.txt"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"source": []}, "is dict; it has to be a list of corpora"),
        ([], "is an empty list; it has to be"),
        (["a.txt"], "entry 1 has no list of files"),
        ([{"source": "a.txt"}], "entry 1 has no list of files"),
        ([{"source": []}], "entry 1 has no list of files"),
        ([entry("a.txt", source_lang=3)], "entry 1: source_lang is 3"),
        ([entry("a.txt"), entry("x/y.txt", weight=1)], "entry 1 has neither weight nor count"),
        ([entry("a.txt", "x/y.txt")], r"entry 1 names x/y\.txt, which is not a file below"),
        ([entry("a.txt", weight=-1)], "entry 1: weight is -1; give a positive number"),
        ([entry("a.txt", weight="1")], "entry 1: weight is '1'"),
        ([entry("a.txt", count=float("nan"))], "entry 1: count is nan"),
        ([entry("a.txt", weight=True)], "entry 1: weight is True"),
        ([entry("a.txt", weight=0), entry("b.txt", weight=0)], "nothing to read: all weights are"),
    ],
)
def test_a_bad_index_is_refused_in_one_sentence(data, entries, message):
    write_index(data, "train", entries)
    with pytest.raises(UserError, match=message) as error:
        read_index(data, "train")
    assert str(data / "json/train.json") in str(error.value)


def test_a_bad_entry_is_named_with_its_line(data):
    good, bad = json.dumps(entry("a.txt", weight=1)), json.dumps(entry("gone.txt", weight=1))
    (data / "json").mkdir()
    (data / "json/train.json").write_text(f"[\n {good} ,\n\n{bad}\n]\n")
    with pytest.raises(UserError, match=r"train\.json:4: entry 2 names gone\.txt.*; put it there"):
        read_index(data, "train")
    (data / "json/train.json").write_text(f"\n[{good}, 3]")
    with pytest.raises(UserError, match=r"train\.json:2: entry 2 has no list of files"):
        read_index(data, "train")


def test_a_file_that_is_no_json_is_refused_with_its_line(data):
    (data / "json").mkdir()
    (data / "json/train.json").write_text('[\n{"source": [}\n]')
    with pytest.raises(UserError, match=r"train\.json:2: not JSON"):
        read_index(data, "train")
    (data / "json/train.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        read_index(data, "train")
    with pytest.raises(UserError, match=r"json/other\.json is not there"):
        read_index(data, "other")


def test_sets_are_indices_and_valid_is_optional(data):
    write_index(data, "train", json.loads("[]"))
    assert find_indices(data, ["valid"]) == []
    write_index(data, "valid", [])
    assert find_indices(data, ["valid", "train", "valid"]) == ["valid", "train"]
    with pytest.raises(UserError, match=r"--valid-subset vaild: .* sets there: train, valid"):
        find_indices(data, ["vaild"])
