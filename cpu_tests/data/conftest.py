"""Small tokenizers, corpora and datasets for the tests of scalerun.data."""

import json
from pathlib import Path

import numpy as np
import pytest

from scalerun.data.collate import Collater
from scalerun.data.streaming_dataset import Recipe, StreamingTextDataset
from scalerun.data.text.layout import TextFile, find_split
from scalerun.data.text.quarantine import QuarantineFile
from scalerun.data.text.token_cache import TokenCache
from scalerun.data.token_block_dataset import Packing
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer, content_digest
from scalerun.data.tokenizers.dictionary import Dictionary
from scalerun.data.tokenizers.json_tokenizer import JsonTokenizer
from scalerun.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from scalerun.data.tokenizers.tokenizer_training import train_byte_level_bpe, train_sentencepiece

VERSE = [
    f"Line {i}: the {word} sleeps,\n\n  and  dreams of {word}s\tand caf\u00e9s {i * 7919}.\n" * 4
    for i, word in enumerate("cat dog owl fox hen".split() * 6)
]


class NumberTokenizer(BaseTokenizer):
    """Text is numbers with spaces between; the end of a document is 2, as in packing tables."""

    def __init__(self):
        self.dictionary = Dictionary(100, bos=0, pad=1, eos=2, unk=3, digest=content_digest("n"))
        self.files = {}

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(str(i) for i in ids)

    def token_text(self, index):
        return str(index)


@pytest.fixture(scope="session")
def model_files(tmp_path_factory):
    """Paths of one small model of each kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    files = {
        "bpe": train_sentencepiece(
            VERSE, vocab_size=400, model_type="bpe", character_coverage=0.9995
        ),
        "unigram": train_sentencepiece(
            VERSE, vocab_size=330, model_type="unigram", character_coverage=0.9995
        ),
        "json": train_byte_level_bpe(VERSE, vocab_size=320),
    }
    paths = {}
    for name, content in files.items():
        paths[name] = folder / f"{name}.{'json' if name == 'json' else 'model'}"
        paths[name].write_bytes(content)
    model = json.loads(files["json"])["model"]
    paths["vocab"] = folder / "vocab.json"
    paths["vocab"].write_text(json.dumps(model["vocab"]))
    paths["merges"] = folder / "merges.txt"
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    paths["merges"].write_text("#version: 0.2\n" + merges + "\n", encoding="utf-8")
    return paths


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(model_files):
    return SentencePieceTokenizer(model_files["bpe"])


@pytest.fixture(scope="session")
def json_tokenizer(model_files):
    return JsonTokenizer.from_json(model_files["json"])


@pytest.fixture
def numbers():
    return NumberTokenizer()


@pytest.fixture
def text_file(tmp_path):
    """Write a file of bytes: ``text_file(b"...", "web.jsonl")`` -> TextFile."""

    def make(content, name="web.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return TextFile(path, name)

    return make


@pytest.fixture
def write_corpus(tmp_path):
    """Write documents: ``write_corpus({"train/00/web.jsonl": [[5, 6], [7]]})`` -> folder."""

    def write(files, root="data"):
        folder = tmp_path / root
        for name, documents in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            texts = [d if isinstance(d, str) else " ".join(map(str, d)) for d in documents]
            lines = [json.dumps({"text": text}) + "\n" for text in texts]
            path.write_text("".join(lines), encoding="utf-8")
        return folder

    return write


@pytest.fixture
def open_dataset(tmp_path, numbers):
    """Open a split of a folder of number documents."""

    def make(
        data, split="train", *, mode="none", length=5, seed=1, mixture=None, cache="cache",
        tokenizer=None, skip=False, **collating,
    ):  # fmt: skip
        tokenizer = tokenizer or numbers
        recipe = Recipe(Packing(mode, length, split_long=seed is None), seed)
        if mixture is not None:
            recipe = Recipe(recipe.packing, seed, mixture)
        return StreamingTextDataset(
            find_split(data, split),
            TokenCache(tmp_path / cache, tokenizer, skip_bad_records=skip),
            recipe=recipe,
            collater=Collater(pad_id=tokenizer.dictionary.pad, **collating),
            quarantine=QuarantineFile(tmp_path / "quarantine.jsonl"),
        )

    return make


@pytest.fixture
def number_corpus(write_corpus):
    """Three shards of documents whose tokens are all different within a document."""
    generator = np.random.default_rng(0)
    documents = [list(range(4, 4 + int(n))) for n in generator.integers(1, 30, size=60)]
    return write_corpus(
        {
            "train/0/web.jsonl": documents[:20],
            "train/1/web.jsonl": documents[20:24],
            "train/2/books.jsonl": documents[24:40],
            "train/2/web.jsonl": documents[40:],
            "valid/one/0/web.jsonl": documents[:7],
        }
    )


@pytest.fixture(scope="session")
def demo_texts():
    """Documents of the bundled corpus, or stand-ins where it is absent."""
    file = Path(__file__).parents[2] / "projects/quickstart/data/train/00/plays.jsonl"
    if not file.exists():
        return VERSE
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").split("\n")[:5]]
