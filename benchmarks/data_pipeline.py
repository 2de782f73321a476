"""How fast text becomes batches: tokenising, reading, the first batch, the start after a stop.

    python -m benchmarks.data_pipeline CORPUS --tokenizer FILE

CORPUS is laid out as for training (``train/<shard>/*.jsonl``). Prints a Markdown table and, with
``--out``, appends a JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import scalerun.tasks
from scalerun.data.loader import BatchLoader
from scalerun.data.streaming_dataset import StreamingTextDataset
from scalerun.tasks.base_task import BaseTask, setup_task
from scalerun.tasks.streaming_language_modeling import StreamingLanguageModelingConfig

assert scalerun.tasks.TASK_REGISTRY  # the import registers the tasks
RESUME_POINTS = (0.0, 0.25, 0.5, 0.75, 0.99)


class Stopwatch:
    """Wall and CPU seconds of the last ``with`` block."""

    wall = cpu = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time this block."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall, self.cpu = time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Measure everything once on an empty cache and then on a full one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", help="folder of text, laid out as for training")
    parser.add_argument("--tokenizer", default="bytes", help="as for scalerun.cli.train")
    parser.add_argument("--tokens-per-sample", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--batches", type=int, default=2000, help="batches to time")
    parser.add_argument("--workers", type=int, default=2, help="beside 0, also try this many")
    parser.add_argument("--break-mode", default="none", help="as --sample-break-mode in training")
    parser.add_argument("--out", type=Path, help="file to append the numbers to")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        numbers = measure(options, folder)
    finally:
        shutil.rmtree(folder)
    if options.out is not None:
        with options.out.open("a") as results:
            results.write(json.dumps(numbers) + "\n")
    print("| | |\n|---|---|")
    for name, value in numbers.items():
        print(f"| {name} | {value if isinstance(value, str) else format(value, ',.4g')} |")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float | str]:
    """All numbers, by what they are."""
    watch = Stopwatch()
    with watch.running():
        dataset = open_dataset(options, folder)
        for shard in range(dataset.num_shards()):
            dataset.shard(1, shard)
    counts = dataset.counts()
    numbers: dict[str, float | str] = {
        "text, MB": counts.num_bytes / 1e6,
        "documents": counts.documents,
        "tokens": counts.tokens,
        "tokenise everything, s": watch.wall,
        "tokenise, MB/s": counts.num_bytes / 1e6 / watch.wall,
        "tokenise, MB per CPU-s": counts.num_bytes / 1e6 / watch.cpu,
    }
    with watch.running():
        next(make_loader(options, open_dataset(options, folder)).updates())
    numbers["first batch from a full cache, ms"] = 1e3 * watch.wall
    for workers in (0, options.workers):
        loader = make_loader(options, open_dataset(options, folder), workers)
        updates = loader.updates()
        next(updates)
        with watch.running():
            count = sum(1 for _ in itertools.islice(updates, options.batches))
        numbers[f"batches/s, {workers} workers"] = count / watch.wall
        numbers[f"CPU ms per batch in the main process, {workers} workers"] = (
            1e3 * watch.cpu / count
        )
        updates.close()  # type: ignore[attr-defined]
    for point in RESUME_POINTS:
        numbers[f"resume at {point:.0%} of an epoch, ms"] = resume_time(options, folder, point)
    return numbers


def open_dataset(options: argparse.Namespace, folder: Path) -> StreamingTextDataset:
    """The training set as a run would open it, with its cache in ``folder``."""
    cfg = StreamingLanguageModelingConfig(
        data=options.corpus,
        tokenizer=options.tokenizer,
        tokens_per_sample=options.tokens_per_sample,
        sample_break_mode=options.break_mode,
    )
    task: BaseTask = setup_task(
        cfg.named("streaming_language_modeling"),
        seed=1,
        cache_dir=folder,
        quarantine=folder / "quarantine.jsonl",
    )
    dataset = task.load_dataset("train")
    assert isinstance(dataset, StreamingTextDataset)
    return dataset


def make_loader(
    options: argparse.Namespace, dataset: StreamingTextDataset, num_workers: int = 0
) -> BatchLoader:
    """A loader of one batch per update."""
    return BatchLoader(
        dataset,
        batch_size=options.batch_size,
        update_freq=lambda epoch: 1,
        num_workers=num_workers,
        buffer_size=10,
    )


def resume_time(options: argparse.Namespace, folder: Path, point: float) -> float:
    """Milliseconds (median of 3) from nothing to the first batch behind a place in the epoch."""
    loader = make_loader(options, open_dataset(options, folder))
    total = loader.updates_per_epoch()
    if total is None:
        total = sum(
            1 for _ in itertools.takewhile(lambda _: not loader.end_of_epoch, loader.updates())
        )
        loader = make_loader(options, open_dataset(options, folder))
    loader.skip_updates(int(point * total))
    state: dict[str, Any] = loader.state_dict()
    watch, times = Stopwatch(), []
    for _ in range(3):
        with watch.running():
            resumed = make_loader(options, open_dataset(options, folder))
            resumed.load_state_dict(state)
            next(resumed.updates())
        times.append(1e3 * watch.wall)
    return statistics.median(times)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
