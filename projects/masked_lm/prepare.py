"""Make a folder for ``--task pretraining`` of JSON lines: ``python prepare.py DATA OUTPUT``.

``DATA/train`` becomes one corpus for each file name, weighted by its size, and each folder of
``DATA/valid`` a validation set.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import sentencepiece

VOCABULARY = 160
SENTENCE_END = re.compile(r"(?<=[.!?;:])[\"')\]]*\s+|\s*\n\s*")
LONGEST = 80
"""Characters of a line; a longer sentence is cut at spaces."""


def lines_of(text: str) -> list[str]:
    """The sentences of a document."""
    lines: list[str] = []
    for sentence in SENTENCE_END.split(text.strip()):
        while len(sentence) > LONGEST:
            cut = sentence.rfind(" ", 0, LONGEST)
            cut = LONGEST if cut <= 0 else cut
            lines.append(sentence[:cut])
            sentence = sentence[cut:].strip()
        lines.append(sentence)
    return [line for line in lines if line]


def write_shard(source: Path, target: Path) -> None:
    """One file of JSON lines as sentences, with blank lines between documents."""
    records = source.read_text(encoding="utf-8").splitlines()
    documents = ["\n".join(lines_of(json.loads(record)["text"])) for record in records]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n\n".join(documents) + "\n", encoding="utf-8")


def write_index(output: Path, name: str, corpora: dict[str, list[str]]) -> None:
    """The index of a set: the shards of each corpus, weighted by their size."""
    entries = [
        {
            "source": shards,
            "source_lang": corpus,
            "weight": sum((output / shard).stat().st_size for shard in shards),
        }
        for corpus, shards in corpora.items()
    ]
    (output / "json").mkdir(exist_ok=True)
    (output / "json" / f"{name}.json").write_text(json.dumps(entries, indent=1), encoding="utf-8")


def write_vocabulary(output: Path, shards: list[Path]) -> None:
    """The sentencepiece model and the list of its pieces."""
    sentencepiece.SentencePieceTrainer.train(
        input=[str(shard) for shard in shards],
        model_prefix=str(output / "sentencepiece.bpe"),
        model_type="bpe",
        vocab_size=VOCABULARY,
        minloglevel=2,
    )
    listed = (output / "sentencepiece.bpe.vocab").read_text(encoding="utf-8").split("\n")[3:]
    text = "\n".join(listed).replace("\t", " ")
    (output / "dict.txt").write_text(text, encoding="utf-8")


def main(data: Path, output: Path) -> None:
    """Make the whole folder."""
    train: dict[str, list[str]] = {}
    for source in sorted((data / "train").rglob("*.jsonl")):
        name = f"shard/train/{source.parent.name}-{source.stem}.txt"
        write_shard(source, output / name)
        train.setdefault(source.stem, []).append(name)
    write_index(output, "train", train)
    for source in sorted((data / "valid").rglob("*.jsonl")):
        name = f"shard/valid/{source.stem}.txt"
        write_shard(source, output / name)
        write_index(output, source.stem, {source.stem: [name]})
    write_vocabulary(output, sorted((output / "shard/train").glob("*.txt")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
