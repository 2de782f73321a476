import pytest

from cpu_tests.binarised import pairs_folder, write_pairs
from scalerun.data.parallel.binarised_pairs import PairFolder, find_languages, has_pairs
from scalerun.dataclass.errors import ConfigError, UserError


@pytest.fixture
def folder(tmp_path):
    return pairs_folder(tmp_path / "data")


@pytest.fixture
def pairs(folder):
    return PairFolder(folder, "en", "es")


def names(prefixes):
    return [[path.name for path in side] for side in prefixes]


def test_the_names_of_the_files_say_the_languages(folder, tmp_path):
    assert has_pairs(folder)
    assert find_languages(folder) == ("en", "es")
    assert not has_pairs(tmp_path / "nowhere")
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="--source-lang is required"):
        find_languages(tmp_path / "none")
    (folder / "train.en-zh-CN.en.bin").touch()
    with pytest.raises(ConfigError, match=r"of several languages \(en-es, en-zh-CN\); choose"):
        find_languages(folder)


def test_the_same_files_are_read_in_both_directions(folder, pairs):
    there = pairs.prefixes("valid", whole=True)
    assert names(there) == [["valid.en-es.en"], ["valid.en-es.es"]]
    back = PairFolder(folder, "es", "en").prefixes("valid", whole=True)
    assert back == there[::-1]
    assert pairs.prefixes("valid", whole=True, with_target=False) == there[:1]


def test_numbered_files_continue_a_set_to_train_on_and_are_sets_to_validate_on(pairs):
    assert names(pairs.prefixes("train", whole=True))[0] == ["train.en-es.en", "train1.en-es.en"]
    assert names(pairs.prefixes("train1", whole=True))[1] == ["train1.en-es.es"]
    assert names(pairs.prefixes("train", whole=False))[0] == ["train.en-es.en"]
    assert pairs.sets(["valid", "train"]) == ["valid", "train", "train1"]


def test_a_set_that_is_not_there_is_named_with_those_that_are(pairs, tmp_path):
    there = "sets of --source-lang en and --target-lang es: test, train, train1, valid"
    with pytest.raises(UserError, match=f"data has no dev.en-es.en.idx; {there}"):
        pairs.prefixes("dev", whole=False)
    with pytest.raises(UserError, match=f"--valid-subset dev is not in .*data; {there}"):
        pairs.sets(["dev"])
    other = PairFolder(write_pairs(tmp_path / "other", {"train": [["the"]]}), "en", "es")
    assert other.sets(["valid"]) == []


@pytest.mark.parametrize(("lost", "left"), [("en", "es"), ("es", "en")])
def test_a_missing_side_is_named(folder, pairs, lost, left):
    for suffix in (".idx", ".bin"):
        (folder / f"train1.en-es.{lost}{suffix}").unlink()
    says = f"data/train1.en-es.{lost}.idx and .bin are not there, but belong to train1.en-es.{left}"
    with pytest.raises(UserError, match=says):
        pairs.prefixes("train", whole=True)
    assert pairs.has_side("train1", left)
    assert not pairs.has_side("train1", lost)
