import json

import pytest

from scalerun.data.tokenizers.json_tokenizer import JsonTokenizer
from scalerun.dataclass.errors import UserError


def test_vocabulary_and_merges_give_the_same_ids_as_the_json_file(model_files, json_tokenizer):
    pair = JsonTokenizer.from_vocab_and_merges(model_files["vocab"], model_files["merges"])
    text = "the cat  sleeps,\n\nthe café"
    assert pair.encode(text) == json_tokenizer.encode(text)
    assert set(pair.files) == {"vocab.json", "merges.txt"}


def test_special_symbols_spelled_out_are_text(json_tokenizer):
    ids = json_tokenizer.encode("a</s>b")
    assert json_tokenizer.dictionary.eos not in ids
    assert json_tokenizer.decode(ids) == "a</s>b"


def test_a_vocabulary_with_one_special_symbol_uses_it_at_both_ends(model_files, tmp_path):
    table = json.loads(model_files["vocab"].read_text())
    names = {"</s>": "<|endoftext|>", "<s>": "x1", "<pad>": "x2", "<unk>": "x3"}
    table = {names.get(name, name): index for name, index in table.items()}
    vocab = tmp_path / "vocab.json"
    vocab.write_text(json.dumps(table))
    dictionary = JsonTokenizer.from_vocab_and_merges(vocab, model_files["merges"]).dictionary
    assert dictionary.bos == dictionary.eos == table["<|endoftext|>"]
    assert dictionary.pad == len(table)
    assert dictionary.unk is None


def test_an_end_symbol_that_is_not_there_is_refused(model_files):
    with pytest.raises(UserError, match="no token '<doc>'; name the token that ends"):
        JsonTokenizer.from_json(model_files["json"], "<doc>")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {}}', "\0"])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"x\.json is not a tokenizers \.json file"):
        JsonTokenizer.from_json(path)


@pytest.mark.parametrize(
    ("vocab", "merges"),
    [
        ("[]", ""),
        ("{}", ""),
        ('{"a": "b"}', ""),
        ('{"a": 0}', "a b c"),
        ('{"a": 0}', "a b"),
        ("{", ""),
    ],
)
def test_another_vocabulary_is_refused(tmp_path, vocab, merges):
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(UserError, match="are not a byte-level BPE vocabulary"):
        JsonTokenizer.from_vocab_and_merges(tmp_path / "vocab.json", tmp_path / "merges.txt")
