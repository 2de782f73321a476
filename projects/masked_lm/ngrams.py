"""Compare a model with n-gram models on the same hidden tokens: ``ngrams.py RUN VALID_JSON``.

The n-gram models are counted in the training text. They are asked with the true tokens around a
hidden one, which the model may have to do without.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from scalerun.cli.inference import load_for_inference
from scalerun.data.masked.masking import MaskedBlock
from scalerun.tasks.base_task import BaseTask

Context = tuple[str, int, int] | tuple[str, int] | tuple[str]
NAMES = ("unigram", "trigram", "two-sided", "model")


def blocks_of(task: BaseTask, name: str) -> Iterator[MaskedBlock]:
    """The sequences of a set, each once."""
    dataset = task.load_dataset(name, training=False)
    for index in range(dataset.num_shards()):
        yield from dataset.shard(1, index)


def whole(block: MaskedBlock) -> list[int]:
    """The tokens as they were, with a border on either side."""
    tokens = block.tokens.copy()
    tokens[block.places] = block.targets
    return [-1, -1, *tokens.tolist(), -1]


def contexts(tokens: list[int], place: int) -> dict[str, list[Context]]:
    """What each model looks at, the closest first; ``place`` counts the borders."""
    before, left, right = tokens[place - 2], tokens[place - 1], tokens[place + 1]
    return {
        "unigram": [("none",)],
        "trigram": [("two", before, left), ("one", left), ("none",)],
        "two-sided": [("around", left, right), ("one", left), ("none",)],
    }


def count(task: BaseTask) -> dict[Context, int]:
    """The most frequent token of each context in the training text."""
    counts: defaultdict[Context, Counter[int]] = defaultdict(Counter)
    for block in blocks_of(task, "train"):
        tokens = whole(block)
        for place in range(2, len(tokens) - 1):
            for context in {c for each in contexts(tokens, place).values() for c in each}:
                counts[context][tokens[place]] += 1
    return {context: found.most_common(1)[0][0] for context, found in counts.items()}


def accuracies(task: BaseTask, name: str, best: dict[Context, int]) -> dict[str, float]:
    """The share of a set's hidden tokens that each n-gram model names."""
    correct: Counter[str] = Counter()
    total = 0
    for block in blocks_of(task, name):
        tokens = whole(block)
        for place in block.places.tolist():
            total += 1
            for model, found in contexts(tokens, place + 2).items():
                guess = next(best[context] for context in found if context in best)
                correct[model] += guess == tokens[place + 2]
    return {model: correct[model] / total for model in NAMES[:-1]}


def main(run: Path, scores: Path) -> None:
    """Print a table with a row for each set."""
    task = load_for_inference(str(run), device=torch.device("cpu")).task
    best = count(task)
    print("accuracy    " + "".join(name.rjust(11) for name in NAMES))
    for name, numbers in json.loads(scores.read_text(encoding="utf-8")).items():
        row = {**accuracies(task, name, best), "model": numbers["accuracy"]}
        print(name.ljust(12) + "".join(f"{100 * row[model]:10.1f}%" for model in NAMES))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
