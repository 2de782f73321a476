import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from scalerun.data.tokenizers.byte_tokenizer import ByteTokenizer
from scalerun.data.tokenizers.json_tokenizer import JsonTokenizer
from scalerun.data.tokenizers.words import Word, WordReader, WordTable


@pytest.fixture
def metaspace():
    """A vocabulary that spells its spaces as sentencepiece does, in the other library."""
    symbols = ["<s>", "<pad>", "</s>", "▁", *"abcd.\n\t é", "▁a", "▁b", "ab"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b")]
    model = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=merges))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    model.decoder = decoders.Metaspace(prepend_scheme="never")
    return JsonTokenizer(model, {})


@pytest.fixture(params=["bytes", "sentencepiece", "json", "metaspace"])
def tokenizer(request):
    if request.param == "bytes":
        return ByteTokenizer()
    name = request.param if request.param == "metaspace" else f"{request.param}_tokenizer"
    return request.getfixturevalue(name)


def read(tokenizer, tokens, logprobs):
    reader = WordReader(tokenizer)
    words = [word for pair in zip(tokens, logprobs, strict=True) for word in reader.push(*pair)]
    words += reader.finish()
    return words, reader.num_words


def test_words_are_those_between_white_space_and_their_scores_add_up(tokenizer):
    end = tokenizer.dictionary.eos

    @given(st.lists(st.text(st.sampled_from("abcd.  \n\té"), min_size=1), min_size=1, max_size=4))
    @settings(max_examples=100)
    def check(texts):
        tokens = [token for text in texts for token in [*tokenizer.encode(text), end]]
        logprobs = [-1.0 - i for i in range(len(tokens))]
        words, count = read(tokenizer, tokens, logprobs)
        for number, text in enumerate(texts):
            mine = [word for word in words if word.document == number]
            assert [word.text for word in mine[:-1]] == text.split()
            assert [word.is_end for word in mine] == [False] * (len(mine) - 1) + [True]
        assert count == sum(len(text.split()) for text in texts)
        assert sum(word.num_tokens for word in words) == len(tokens)
        assert sum(word.logprob for word in words) == sum(logprobs)

    check()


def test_a_stream_may_end_inside_a_word():
    tokenizer = ByteTokenizer()
    words, count = read(tokenizer, list(b"ab cd"), [-1.0] * 5)
    assert [(word.text, word.logprob) for word in words] == [("ab", -2), ("cd", -3)]
    assert count == 2


def test_statistics_are_means_over_occurrences_and_over_what_follows():
    table = WordTable()
    for document, text in enumerate(["a b a", "b", "a"]):
        for word in text.split():
            table.add(Word(word, {"a": -1.0, "b": -3.0}[word], 1, document))
        if document < 2:
            table.add(Word("</s>", -0.5, 1, document, is_end=True))
    table.finish()
    rows = dict(table.by_count())
    assert list(rows) == ["a", "</s>", "b"]
    assert (rows["a"].count, rows["a"].mean_logprob, rows["a"].without_next) == (3, -1.0, 2)
    assert rows["a"].mean_next_logprob == -3.0
    assert (rows["b"].without_next, rows["b"].mean_next_logprob) == (1, -1.0)
    assert rows["</s>"].mean_next_logprob is None
    assert math.isclose(rows["</s>"].mean_logprob, -0.5)
