import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerun.data.tokenizers.base_tokenizer import StreamDecoder, content_digest
from scalerun.data.tokenizers.tokenizer import load_tokenizer

TEXT = st.text(
    st.one_of(
        st.sampled_from(" \n\t\r\N{LOWER ONE EIGHTH BLOCK}\N{LINE SEPARATOR}\0catsé<s></s><unk>"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
)
KINDS = ["bytes", "bpe", "unigram", "json", "gpt2"]


@pytest.fixture(params=KINDS, scope="module")
def tokenizer(request, model_files):
    if request.param == "gpt2":
        return load_tokenizer(None, str(model_files["vocab"]), str(model_files["merges"]))
    return load_tokenizer(str(model_files.get(request.param, request.param)))


@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_decoding_gives_the_text_back_and_text_never_makes_special_ids(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & tokenizer.dictionary.dropped_ids


@given(texts=st.lists(TEXT, max_size=4), num_threads=st.sampled_from([1, 2]))
@settings(max_examples=50, deadline=None)
def test_a_batch_gives_what_single_texts_give(tokenizer, texts, num_threads):
    batch = tokenizer.encode_batch(texts, num_threads=num_threads)
    assert [list(ids) for ids in batch] == [tokenizer.encode(text) for text in texts]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_stream_joins_to_the_decoding_of_any_ids(tokenizer, data):
    size = len(tokenizer.dictionary)
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=30))
    decoder = StreamDecoder(tokenizer)
    assert "".join([*map(decoder.push, ids), decoder.finish()]) == tokenizer.decode(ids)


def test_a_stream_holds_an_unfinished_character_back(tokenizer):
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(index) for index in tokenizer.encode("日本")]
    assert "".join(pieces) == "日本"
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_special_symbols_and_fillers_have_no_text(tokenizer):
    dictionary = tokenizer.dictionary
    ids = tokenizer.encode("a b")
    dropped = sorted(dictionary.dropped_ids)
    assert tokenizer.decode([dictionary.bos, *ids, *dropped, dictionary.eos]) == "a b"


def test_every_id_can_be_shown(tokenizer):
    assert all(tokenizer.token_text(index) for index in range(len(tokenizer.dictionary)))


def test_models_trained_here_keep_line_ends_and_spaces(tokenizer):
    assert tokenizer.is_lossless()


def test_a_digest_depends_on_the_borders_of_its_parts():
    assert content_digest("ab", "c") != content_digest("a", "bc")
