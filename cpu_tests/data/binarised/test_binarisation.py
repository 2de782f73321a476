from collections import Counter

import numpy as np
import pytest

from cpu_tests.binarised import write_dictionary
from scalerun.data.binarised.binarisation import (
    Binariser,
    TextCounts,
    choose_words,
    count_words,
    dictionary_text,
    read_batches,
)
from scalerun.data.tokenizers.fairseq_tokenizer import load_vocabulary
from scalerun.dataclass.errors import UserError

TEXT = b"the cat\r\n\n  \nzebra the"


@pytest.fixture
def binariser(tmp_path):
    write_dictionary(tmp_path)
    return Binariser(load_vocabulary(tmp_path), np.dtype("<u2"))


def test_a_line_is_an_item_and_an_empty_one_has_the_end_symbol_alone(binariser, tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT)
    [batch] = map(binariser, read_batches(tmp_path / "a.txt"))
    assert batch.tokens.tolist() == [4, 5, 2, 2, 2, 3, 4, 2]
    assert batch.tokens.dtype == np.dtype("<u2")
    assert batch.sizes.tolist() == [3, 1, 1, 3]
    assert batch.counts == TextCounts(items=4, tokens=8, unknown=1, bytes=7 + 2 + 9)


def test_json_lines_are_documents(binariser, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "the\\ncat"}\n\n{"text": ""}\n')
    [batch] = map(binariser, read_batches(tmp_path / "a.jsonl"))
    assert batch.tokens.tolist() == [4, 5, 2, 2]
    assert batch.counts.items == 2


@pytest.mark.parametrize("size", [1, 5, 100])
def test_batches_have_every_line_once_whatever_their_size(tmp_path, monkeypatch, size):
    monkeypatch.setattr("scalerun.data.binarised.binarisation.BATCH_BYTES", size << 4)
    lines = [b"x" * (i % 11) for i in range(99)]
    (tmp_path / "a").write_bytes(b"".join(line + b"\n" for line in lines))
    batches = list(read_batches(tmp_path / "a"))
    assert [line for batch in batches for line in batch.lines] == lines
    assert sum(batch.num_bytes for batch in batches) == (tmp_path / "a").stat().st_size
    assert [batch.first for batch in batches] == [
        1 + sum(len(batch.lines) for batch in batches[:i]) for i in range(len(batches))
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"ok\n\xff\n", r"a\.txt:2: not UTF-8"),
        ("a.txt", b"a\0b\n", r"a\.txt:1: a binary file"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "a"}\n', r"a\.jsonl:2: no key 'text'"),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz:1: the compressed stream is damaged"),
    ],
)
def test_a_line_without_text_is_named(binariser, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        list(map(binariser, read_batches(tmp_path / name)))
    assert "\n" not in str(caught.value)


def test_words_are_ranked_by_count_and_then_by_the_alphabet(tmp_path):
    (tmp_path / "a").write_text("b a\nc b <unk> a\nb d\n")
    words = Counter()
    for batch in read_batches(tmp_path / "a"):
        words += count_words(batch).words
    assert choose_words(words) == [("b", 3), ("a", 2), ("c", 1), ("d", 1)]
    assert choose_words(words, threshold=2) == [("b", 3), ("a", 2)]
    assert choose_words(words, num_words=7) == [("b", 3), ("a", 2), ("c", 1)]


@pytest.mark.parametrize(("factor", "fillers"), [(1, 0), (3, 0), (4, 2), (8, 2)])
def test_the_vocabulary_is_filled_up(factor, fillers):
    lines = dictionary_text([("b", 3), ("a", 2)], padding_factor=factor).splitlines()
    assert lines == ["b 3", "a 2", "madeupword0000 0", "madeupword0001 0"][: 2 + fillers]
