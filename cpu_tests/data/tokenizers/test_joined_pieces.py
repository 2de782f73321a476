import pytest

from cpu_tests.binarised import write_dictionary
from scalerun.data.tokenizers.fairseq_tokenizer import load_vocabulary
from scalerun.data.tokenizers.joined_pieces import join_pieces, reference_text
from scalerun.data.tokenizers.tokenizer import load_tokenizer


@pytest.mark.parametrize(
    ("how", "pieces", "text"),
    [
        ("subword_nmt", "the c@@ at s@@ le@@ eps @@", "the cat sleeps"),
        ("subword_nmt", "at@@", "at"),
        ("sentencepiece", "\u2581the \u2581c at , \u2581s leeps", "the cat, sleeps"),
        (None, "the c@@ at", "the c@@ at"),
        ("subword_nmt", "", ""),
    ],
)
def test_pieces_become_words(how, pieces, text):
    assert join_pieces(pieces, how) == text


def test_an_unknown_word_of_a_reference_is_no_hypothesis(tmp_path):
    write_dictionary(tmp_path)
    words = load_vocabulary(tmp_path)
    ids = words.encode("the zebra sleeps yonder")
    assert words.decode(ids) == "the <unk> sleeps <unk>"
    assert reference_text(words, [*ids, 2]) == "the <<unk>> sleeps <<unk>>"
    assert reference_text(load_tokenizer("bytes"), b"as it is ") == "as it is"
