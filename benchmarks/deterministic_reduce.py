"""What ``--deterministic-reduce`` costs, on one and on two data-parallel ranks.

    python -m benchmarks.deterministic_reduce --rounds 5

Runs of ``scalerun.cli.train`` with and without the flag, sharded where there are two ranks, which
are processes of one thread that talk by gloo. An update has the same four batches everywhere. Every
measurement is a new run; rounds are interleaved, so that a slow minute of a shared machine meets
everyone. Appends JSON lines to ``--out`` and prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.measured_process import quiet_environment, run

FLAG = "--deterministic-reduce"
BATCHES = 4
"""Of an update, over all ranks."""
WARMUP = 2
"""Updates that are not counted."""

Key = tuple[int, bool]
"""Ranks, and whether with the flag."""


def write_corpus(folder: Path) -> None:
    """Text whose content nobody looks at."""
    for split in ("train", "valid"):
        file = folder / split / "0/text.jsonl"
        file.parent.mkdir(parents=True)
        lines = (json.dumps({"text": f"{number} bottles of rum. " * 40}) for number in range(400))
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def flags(data: Path, save_dir: Path, key: Key, updates: int) -> list[str]:
    """The command line of one run: 4.9 M parameters, 2,048 tokens in an update."""
    ranks, deterministic = key
    return [
        str(data), "--task", "streaming_language_modeling", "--tokenizer", "bytes",
        "--tokens-per-sample", "128", "--arch", "transformer_lm", "--decoder-layers", "6",
        "--decoder-embed-dim", "256", "--decoder-ffn-embed-dim", "1024",
        "--decoder-attention-heads", "8", "--dropout", "0", "--batch-size", "4", "--cpu",
        "--update-freq", str(BATCHES // ranks), "--distributed-world-size", str(ranks),
        "--max-update", str(updates), "--lr-scheduler", "inverse_sqrt", "--clip-norm", "1",
        "--log-interval", "1", "--log-format", "none", "--disable-validation", "--no-save",
        "--save-dir", str(save_dir), *([FLAG] if deterministic else []),
    ]  # fmt: skip


def measure(key: Key, data: Path, updates: int) -> float:
    """Updates per second of a run, after those that warm up."""
    with tempfile.TemporaryDirectory() as folder:
        words = flags(data, Path(folder), key, updates)
        run([sys.executable, "-m", "scalerun.cli.train", *words], quiet_environment(1))
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    first, last = records[WARMUP - 1], records[-1]
    updates_done = last["num_updates"] - first["num_updates"]
    return float(updates_done / (last["train_wall"] - first["train_wall"]))


def table(found: dict[Key, list[float]]) -> str:
    """Medians and ranges, and of the ratio of each round."""
    lines = ["| ranks | without | with the flag | with / without |", "|---|---|---|---|"]
    for ranks in sorted({ranks for ranks, _ in found}):
        plain, tree = found[ranks, False], found[ranks, True]
        ratios = [with_it / without for with_it, without in zip(tree, plain, strict=True)]
        cells = " | ".join(shown(numbers) for numbers in (plain, tree, ratios))
        lines.append(f"| {ranks} | {cells} |")
    return "\n".join(lines)


def shown(numbers: list[float]) -> str:
    """A median with its range."""
    return f"{statistics.median(numbers):.2f} ({min(numbers):.2f}-{max(numbers):.2f})"


def main() -> None:
    """Measure all in turn, and print updates per second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("deterministic_reduce.jsonl"))
    options = parser.parse_args()
    found: dict[Key, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder))
        for turn in range(options.rounds):
            for ranks in (1, 2):
                # Whoever comes first in one round comes last in the next.
                for deterministic in (False, True) if turn % 2 == 0 else (True, False):
                    load = os.getloadavg()[0]
                    speed = measure((ranks, deterministic), Path(folder), options.updates)
                    found[ranks, deterministic].append(speed)
                    row = {"ranks": ranks, "deterministic": deterministic, "load": load}
                    with options.out.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(row | {"updates_per_s": speed}) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
