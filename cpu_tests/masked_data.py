"""A small data folder for masked language modelling: index, shards, vocabulary."""

import json
import random

import sentencepiece

WORDS = "cat dog owl fox hen sleeps runs sings here there now then the a old young".split()


def sentences(count, seed):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for _ in range(count)]


def write_vocabulary(data, lines):
    """A sentencepiece model and the ``dict.txt`` that belongs to it."""
    data.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(data / "sentencepiece.bpe"),
        model_type="bpe",
        vocab_size=60,
        minloglevel=2,
    )
    (data / "sentencepiece.bpe.vocab").unlink()
    model = sentencepiece.SentencePieceProcessor(model_file=str(data / "sentencepiece.bpe.model"))
    listed = [
        f"{model.id_to_piece(i)} {int(model.get_score(i))}\n" for i in range(3, model.vocab_size())
    ]
    (data / "dict.txt").write_text("".join(listed), encoding="utf-8")


def write_index(data, name, entries):
    (data / "json").mkdir(parents=True, exist_ok=True)
    (data / f"json/{name}.json").write_text(json.dumps(entries), encoding="utf-8")


def write_shard(path, documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join("\n".join(document) for document in documents)
    path.write_text(text + "\n", encoding="utf-8")


def make_masked_data(data):
    """Two corpora of unequal weight, of two shards and one, and a validation set."""
    write_vocabulary(data, sentences(200, seed=1))
    for i, name in enumerate(("train/00000", "train/00001", "train/other", "valid/00000")):
        lines = sentences(60, seed=10 + i)
        cuts = [lines[j : j + 7] for j in range(0, 60, 7)]
        write_shard(data / f"shard/{name}.txt", cuts)
    one = ["shard/train/00000.txt", "shard/train/00001.txt"]
    other = ["shard/train/other.txt"]
    write_index(
        data,
        "train",
        [
            {"source": one, "source_lang": "en", "weight": 3.0},
            {"source": other, "source_lang": "other", "weight": 1.0},
        ],
    )
    write_index(data, "valid", [{"source": ["shard/valid/00000.txt"], "source_lang": "en"}])
    return data
