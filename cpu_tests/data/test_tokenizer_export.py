import json
import random

import pytest
from tokenizers import Tokenizer

from cpu_tests.cli.formats.conftest import write_bpe
from scalerun.data.tokenizer_export import PROBES, ROLES_FILE, TOKENIZER_FILE, export_tokenizer
from scalerun.data.tokenizers.byte_tokenizer import ByteTokenizer
from scalerun.data.tokenizers.json_tokenizer import JsonTokenizer
from scalerun.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from scalerun.data.tokenizers.tokenizer_training import train_sentencepiece

WORDS = "the owl sat on a mat; naive caf\u00e9 1984 (x + y)".split()


def texts():
    draw = random.Random(1)
    return [" ".join(draw.choices(WORDS, k=9)) + "\n" for _ in range(200)]


def sentencepiece_tokenizer(folder, kind):
    path = folder / "t.model"
    settings = {"vocab_size": 300, "model_type": kind, "character_coverage": 1.0}
    path.write_bytes(train_sentencepiece(texts(), **settings))
    return SentencePieceTokenizer(path)


def bpe_tokenizer(folder):
    write_bpe(folder, special=(), last=("<|endoftext|>",))
    return JsonTokenizer.from_vocab_and_merges(folder / "vocab.json", folder / "merges.txt")


def exported(tokenizer, folder):
    out = folder / "out"
    out.mkdir()
    assert export_tokenizer(tokenizer, out, max_length=32)
    model = Tokenizer.from_file(str(out / TOKENIZER_FILE))
    return model, json.loads((out / ROLES_FILE).read_text())


@pytest.mark.parametrize("kind", ["bytes", "unigram", "bpe", "vocabulary and merges"])
def test_texts_get_the_same_symbols_behind_the_end_symbol(kind, tmp_path):
    tokenizer = {
        "bytes": lambda: ByteTokenizer(),
        "unigram": lambda: sentencepiece_tokenizer(tmp_path, "unigram"),
        "bpe": lambda: sentencepiece_tokenizer(tmp_path, "bpe"),
        "vocabulary and merges": lambda: bpe_tokenizer(tmp_path),
    }[kind]()
    model, roles = exported(tokenizer, tmp_path)
    eos = tokenizer.dictionary.eos
    assert model.token_to_id(roles["eos_token"]) == model.token_to_id(roles["bos_token"]) == eos
    assert roles["model_max_length"] == 32
    model.encode_special_tokens = True
    for text in (*PROBES, *texts()):
        ids = model.encode(text).ids
        assert ids == [eos, *tokenizer.encode(text)]
        assert model.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)


def test_what_would_be_spelled_otherwise_is_not_written(tmp_path, monkeypatch):
    tokenizer = bpe_tokenizer(tmp_path)
    monkeypatch.setattr(tokenizer, "encode", lambda text: [0])
    assert not export_tokenizer(tokenizer, tmp_path, max_length=None)
    assert not (tmp_path / TOKENIZER_FILE).exists()
