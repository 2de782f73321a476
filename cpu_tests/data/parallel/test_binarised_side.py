import json

import numpy as np
import pytest

from cpu_tests.binarised import english_lines, pairs_folder, write_dictionary, write_set
from scalerun.data.parallel.binarised_side import binarised_side
from scalerun.data.parallel.side import Longest
from scalerun.data.tokenizers.fairseq_tokenizer import load_vocabulary
from scalerun.dataclass.errors import UserError

NO_LIMIT = Longest(None, "--max-source-positions")


@pytest.fixture
def folder(tmp_path):
    return pairs_folder(tmp_path / "data")


@pytest.fixture
def side(folder):
    """The English side of files of the folder."""

    def side(*names):
        prefixes = [folder / f"{name}.en-es.en" for name in names]
        return binarised_side(prefixes, load_vocabulary(folder, "en"), NO_LIMIT, language="en")

    return side


def test_the_items_of_all_files_stand_in_one_row(side):
    both = side("train", "train1")
    lines = english_lines(46)
    assert [both.text(i).split() for i in range(46)] == lines
    assert both.rows.lengths_N.tolist() == [len(line) + 1 for line in lines]
    assert both.rows.row(45)[-1] == 2
    assert both.rows.place(29) == ("train.en-es.en.bin", 30)
    assert both.rows.place(30) == ("train1.en-es.en.bin", 1)
    assert both.digest != side("train").digest


def test_bytes_are_known_where_every_text_was_counted(folder, side):
    everything = np.arange(46)
    assert side("train", "train1").rows.num_bytes(everything) == 0
    record = {"sets": {"train.en-es.en": {"bytes": 300}, "train1.en-es.en": {"bytes": 70}}}
    (folder / "preprocess.json").write_text(json.dumps(record))
    rows = side("train", "train1").rows
    assert rows.num_bytes(everything) == 370
    assert rows.num_bytes(everything[1:]) == 0
    assert side("train", "valid").rows.num_bytes(everything[:36]) == 0


def damaged_index(folder):
    path = folder / "train.en-es.en.idx"
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "train.en-es.en.bin").unlink(), "train.en-es.en.bin is not ther"),
        (damaged_index, r"data/train.en-es.en.idx is damaged: \d+ bytes do not hold 30 items"),
        (
            lambda folder: write_set(folder / "train.en-es.en", [[4, 2], [5, 6]]),
            r"data/train.en-es.en.bin, item 2 ends with the token 6, not with </s> \(2\); binarise",
        ),
        (
            lambda folder: write_set(folder / "train.en-es.en", [[4, 2], []]),
            "data/train.en-es.en.bin, item 2 has no token, not even </s>",
        ),
        (
            lambda folder: write_set(folder / "train.en-es.en", [[4, 12, 2]]),
            "data/train.en-es.en.bin has the token 12, but dict.en.txt has 12 symbols",
        ),
    ],
)
def test_damage_is_one_sentence_with_the_file(folder, side, spoil, says):
    spoil(folder)
    with pytest.raises(UserError, match=says):
        side("train").all_tokens()


def test_the_dictionary_of_a_language_is_its_own(folder):
    vocabulary = load_vocabulary(folder, "es")
    assert list(vocabulary.files) == ["dict.es.txt"]
    assert vocabulary.decode([4, 5]) == "el gato"
    write_dictionary(folder)
    assert load_vocabulary(folder).decode([4]) == "the"
    with pytest.raises(UserError, match=r"data has no dict\.fr\.txt; give a folder"):
        load_vocabulary(folder, "fr")
