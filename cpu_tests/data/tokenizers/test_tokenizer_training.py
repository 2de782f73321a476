from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerun.data.tokenizers.tokenizer_training import (
    _BORDERS,
    _MAX_CHARACTERS,
    _sentences,
    train_byte_level_bpe,
    train_sentencepiece,
)
from scalerun.dataclass.errors import UserError

WORDS = (
    "the quick brown fox jumps over a lazy dog while seven wizards brew potions and sing".split()
)
TEXTS = [" ".join(WORDS[i:] + WORDS[:i]) + "\n\n  the end\tof it" for i in range(len(WORDS))]


def sentencepiece_bpe(texts, vocab_size):
    return train_sentencepiece(
        texts, vocab_size=vocab_size, model_type="bpe", character_coverage=1.0
    )


def byte_level_bpe(texts, vocab_size):
    return train_byte_level_bpe(texts, vocab_size=vocab_size)


def unigram(texts, vocab_size):
    return train_sentencepiece(
        texts, vocab_size=vocab_size, model_type="unigram", character_coverage=1.0
    )


@pytest.mark.parametrize("train", [sentencepiece_bpe, unigram, byte_level_bpe])
def test_the_same_text_gives_the_same_bytes(train):
    assert train(TEXTS, 300) == train(TEXTS, 300)


@pytest.mark.parametrize("train", [sentencepiece_bpe, unigram, byte_level_bpe])
def test_a_vocabulary_too_large_names_the_maximum_which_then_works(train):
    with pytest.raises(UserError, match="the maximum is") as caught:
        train(TEXTS, 100_000)
    train(TEXTS, int(str(caught.value).split()[-1]))


@pytest.mark.parametrize("train", [sentencepiece_bpe, unigram, byte_level_bpe])
def test_a_vocabulary_too_small_names_the_minimum_which_then_works(train):
    with pytest.raises(UserError, match="too small") as caught:
        train(TEXTS, 10)
    train(TEXTS, int(str(caught.value).split("minimum is ")[1].split()[0]))


@pytest.mark.parametrize("texts", [[], [""], ["\n\n"]])
def test_text_without_words_is_refused(texts):
    with pytest.raises(UserError, match="training text is empty"):
        sentencepiece_bpe(texts, 300)


@given(st.lists(st.text(), max_size=3), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_sentences_lose_nothing_but_their_borders(texts, repeat):
    texts = [text * repeat * 500 for text in texts]
    counted = Counter()
    sentences = list(_sentences(texts, counted))
    joined = "".join(sentences)
    assert joined == "".join(_BORDERS.sub("", text) for text in texts)
    assert counted == Counter(joined)
    assert all(0 < len(sentence) <= _MAX_CHARACTERS for sentence in sentences)
