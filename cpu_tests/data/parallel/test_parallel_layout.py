import pytest

from scalerun.data.parallel.parallel_layout import find_pair, find_pair_sets
from scalerun.dataclass.errors import UserError

PAIR = {"source_lang": "en", "target_lang": "es"}


def test_a_set_is_two_files(parallel_corpus):
    source, target = find_pair(parallel_corpus, "valid", **PAIR)
    assert (source.name, target.name) == ("valid.en", "valid.es")
    assert source.path == parallel_corpus / "valid.en"


def test_a_missing_file_is_named_with_the_sets_that_are_there(parallel_corpus):
    (parallel_corpus / "test.en").touch()
    with pytest.raises(UserError, match=r"test\.es is missing: .*--target-lang es: train, valid"):
        find_pair(parallel_corpus, "test", **PAIR)
    with pytest.raises(UserError, match=r"train\.fr is missing: .* are en, es: correct --sour"):
        find_pair(parallel_corpus, "train", source_lang="en", target_lang="fr")


def test_a_folder_in_place_of_a_file_is_called_one(parallel_corpus):
    (parallel_corpus / "train.en").unlink()
    (parallel_corpus / "train.en").mkdir()
    with pytest.raises(UserError, match=r"train\.en is a folder: .* valid; put the file there, or"):
        find_pair(parallel_corpus, "train", **PAIR)


def test_a_language_without_files_is_told_those_that_have_some(parallel_corpus):
    with pytest.raises(UserError, match="are en, es: correct --source-lang fr and --target-lang"):
        find_pair_sets(parallel_corpus, ["valid"], source_lang="fr", target_lang="es")


def test_the_default_set_may_be_absent_and_others_may_not(parallel_corpus):
    assert find_pair_sets(parallel_corpus, ["valid", "train", "valid"], **PAIR) == [
        "valid",
        "train",
    ]
    (parallel_corpus / "valid.en").unlink()
    with pytest.raises(UserError, match=r"valid\.en is missing"):
        find_pair_sets(parallel_corpus, ["valid"], **PAIR)
    (parallel_corpus / "valid.es").unlink()
    assert find_pair_sets(parallel_corpus, ["valid"], **PAIR) == []
    with pytest.raises(UserError, match=r"test\.en is missing"):
        find_pair_sets(parallel_corpus, ["test"], **PAIR)
