import json
import shutil

import pytest

from cpu_tests.binarised import WORDS, write_dictionary
from scalerun.data.tokenizers.base_tokenizer import StreamDecoder
from scalerun.data.tokenizers.byte_tokenizer import ByteTokenizer
from scalerun.data.tokenizers.fairseq_dictionary import read_fairseq_dictionary
from scalerun.data.tokenizers.fairseq_tokenizer import (
    RenumberedTokenizer,
    WordTokenizer,
    load_vocabulary,
    piece_names,
)
from scalerun.data.tokenizers.tokenizer import load_tokenizer
from scalerun.dataclass.errors import UserError

TEXT = "Line 4: the cat sleeps,\n\n  and\tdreams </s> of caf\u00e9s \u2581.\n"


@pytest.fixture
def words(tmp_path):
    write_dictionary(tmp_path)
    return load_vocabulary(tmp_path)


def test_words_are_numbered_as_fairseq_numbers_them(words):
    assert words.encode(" the\tcat \n zebra </s>") == [4, 5, 3, 3]
    assert words.decode([0, 4, 5, 3, 2, 1]) == "the cat <unk>"
    assert [words.token_text(i) for i in (2, 4, 99)] == ["</s>", "the", "<filler 99>"]
    own = words.dictionary
    assert (own.bos, own.pad, own.eos, own.unk) == (0, 1, 2, 3)
    assert own.num_real_symbols == 4 + len(WORDS)
    assert list(words.files) == ["dict.txt"]


def test_the_digest_is_of_the_symbols_and_their_order(tmp_path, words):
    (tmp_path / "dict.txt").write_text("".join(f"{word} 1\n" for word in WORDS))
    assert load_vocabulary(tmp_path).digest == words.digest
    write_dictionary(tmp_path, WORDS[::-1])
    assert load_vocabulary(tmp_path).digest != words.digest


def vocabulary(folder, inner, record=None):
    """A folder whose dictionary lists a tokenizer's pieces, backwards."""
    write_dictionary(folder, [*reversed(piece_names(inner)), "madeupword0000"])
    if record is not None:
        (folder / "preprocess.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("kind", ["bpe", "unigram", "json", "vocab", "bytes"])
def test_the_pieces_of_any_tokenizer_get_the_numbers_of_the_list(tmp_path, model_files, kind):
    if kind == "bytes":
        inner, record = ByteTokenizer(), {"tokenizer": "bytes"}
    elif kind == "vocab":
        inner = load_tokenizer(None, str(model_files["vocab"]), str(model_files["merges"]))
        shutil.copy(model_files["vocab"], tmp_path / "vocab.json")
        shutil.copy(model_files["merges"], tmp_path / "merges.txt")
        record = None
    else:
        inner, record = load_tokenizer(str(model_files[kind])), None
        shutil.copy(model_files[kind], tmp_path / f"tokenizer{model_files[kind].suffix}")
    tokenizer = load_vocabulary(vocabulary(tmp_path, inner, record))
    numbers = read_fairseq_dictionary(tmp_path / "dict.txt")
    ids = tokenizer.encode(TEXT)
    assert isinstance(tokenizer, RenumberedTokenizer)
    by_id = {index: name for name, index in piece_names(inner).items()}
    assert ids == [numbers[by_id[index]] for index in inner.encode(TEXT)]
    assert [each.tolist() for each in tokenizer.encode_batch([TEXT, ""])] == [ids, []]
    assert tokenizer.decode([0, *ids, 2, 1, len(tokenizer.dictionary) - 1]) == TEXT
    decoder = StreamDecoder(tokenizer)
    assert "".join(map(decoder.push, ids)) + decoder.finish() == TEXT
    assert {path.name for path in tmp_path.iterdir()} == set(tokenizer.files)
    assert tokenizer.token_text(2) == "</s>"
    assert tokenizer.token_text(ids[0]) == inner.token_text(inner.encode(TEXT)[0])


def test_no_name_breaks_a_line_or_is_a_symbol_of_fairseqs(model_files):
    for kind in ("bpe", "json"):
        tokenizer = load_tokenizer(str(model_files[kind]))
        names = piece_names(tokenizer)
        assert len(names) == len(set(names.values())) == tokenizer.dictionary.num_real_symbols - 4
        assert not any(set("\r\n") & set(name) for name in names)
        assert not {"<s>", "<pad>", "</s>", "<unk>", ""} & set(names)


def test_a_piece_that_the_list_lacks_is_unknown(tmp_path, model_files):
    inner = load_tokenizer(str(model_files["bpe"]))
    shutil.copy(model_files["bpe"], tmp_path / "tokenizer.model")
    lost = inner.piece(inner.encode("cat")[0])
    write_dictionary(tmp_path, [name for name in piece_names(inner) if name != lost])
    assert load_vocabulary(tmp_path).encode("cat")[0] == 3


def test_a_list_of_something_else_is_refused(tmp_path, model_files):
    shutil.copy(model_files["bpe"], tmp_path / "tokenizer.model")
    write_dictionary(tmp_path, ["zebra"])
    with pytest.raises(UserError, match=r"dict.txt lists 'zebra', which is no piece of the"):
        load_vocabulary(tmp_path)


def test_a_folder_without_a_dictionary_is_refused(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path} has no dict.txt; give a folder"):
        load_vocabulary(tmp_path)
    (tmp_path / "dict.txt").write_text("the\n")
    with pytest.raises(UserError, match=f"^{tmp_path}/dict.txt:1 is 'the'"):
        load_vocabulary(tmp_path)


@pytest.mark.parametrize(("content", "message"), [("{", "cannot be read"), ("[]", "not a JSON")])
def test_a_damaged_record_is_refused(tmp_path, content, message):
    write_dictionary(tmp_path)
    (tmp_path / "preprocess.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_vocabulary(tmp_path)


def test_words_are_the_vocabulary_where_no_tokenizer_lies_beside_the_list(words):
    assert isinstance(words, WordTokenizer)
