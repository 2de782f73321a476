"""What the flags that save memory cost, and what they save.

    python -m benchmarks.memory --rounds 3
    python -m benchmarks.memory --variants plain,chunk_512 --vocabs 50304

Whole updates of the Trainer at the benchmark's shape, with a small and with a large vocabulary.
Every measurement is a new process; rounds are interleaved, so that a slow minute of a shared
machine meets everyone. Appends JSON lines to ``--out`` and prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.adapters.scalerun import build
from benchmarks.bare_loop import BenchmarkShape
from benchmarks.measured_process import quiet_environment, run

RECOMPUTE = "--checkpoint-activations"
CHUNK = "--cross-entropy-chunk-tokens"
VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "all": [RECOMPUTE],
    "every_second": [RECOMPUTE, "--checkpoint-activations-interval", "2"],
    "selective": [RECOMPUTE, "--recompute", "selective"],
    "chunk_128": [CHUNK, "128"],
    "chunk_512": [CHUNK, "512"],
    "chunk_1024": [CHUNK, "1024"],
    "all_chunk_512": [RECOMPUTE, CHUNK, "512"],
}
"""Flags of ``scalerun.cli.train``, by the name of what they do."""

Key = tuple[str, int]
"""Variant and vocabulary."""


def measure(key: Key, *, dtype: str, batch: int, steps: int) -> dict[str, float]:
    """Medians of some updates after one that warms up; milliseconds and megabytes."""
    variant, vocab = key
    shape = BenchmarkShape(vocab=vocab, batch=batch)
    model, step = build(shape, dtype, flags=VARIANTS[variant])
    torch.manual_seed(0)
    tokens = torch.randint(4, vocab, (shape.batch, shape.seq + 1))
    wall, cpu = [], []
    for _ in range(steps + 1):
        start, start_cpu = time.perf_counter(), time.process_time()
        loss = step(tokens)
        wall.append(1e3 * (time.perf_counter() - start))
        cpu.append(1e3 * (time.process_time() - start_cpu))
    found = {
        "wall_ms": statistics.median(wall[1:]),
        "cpu_ms": statistics.median(cpu[1:]),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "loss": loss,
    }
    return found | {"live_mb": live_peak(model, lambda: step(tokens))}


def live_peak(model: nn.Module, step: Callable[[], object]) -> float:
    """Most megabytes that the weights, and all tensors that an update makes, have at a time.

    What the allocator keeps of freed memory does not count, nor what the optimizer holds.
    """
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        step()
    [snapshot] = tracker.get_tracker_snapshot("peak").values()
    return snapshot["Total"] / 2**20


def table(rows: dict[Key, list[dict[str, Any]]]) -> str:
    """Medians over rounds, as Markdown; CPU time and memory beside those without any flag."""

    def median(key: Key, name: str) -> float:
        return statistics.median(row[name] for row in rows[key])

    lines = [
        "| vocabulary | flags | CPU ms | / none | live tensors, MB | - none | peak RSS, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for key in sorted(rows, key=lambda key: key[1]):
        plain = ("plain", key[1])
        cpu, live, peak = (median(key, name) for name in ("cpu_ms", "live_mb", "peak_rss_mb"))
        # Within a round, since the machine's speed changes from one to the next.
        ratio = statistics.median(
            own["cpu_ms"] / base["cpu_ms"] for own, base in zip(rows[key], rows[plain], strict=True)
        )
        more = live - median(plain, "live_mb")
        flags = " ".join(VARIANTS[key[0]]) or "none"
        lines.append(
            f"| {key[1]:,} | `{flags}` | {cpu:,.0f} | {ratio:.2f} | {live:,.0f} | {more:+,.0f} "
            f"| {peak:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure in rounds, or, as a process of its own, one variant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default=",".join(VARIANTS), help="plain is needed")
    parser.add_argument("--vocabs", default="8192,50304")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 256 tokens")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed updates of a measurement")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("memory.jsonl"), help="appended to")
    parser.add_argument("--one", nargs=2, metavar=("VARIANT", "VOCAB"), help="internal")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        key = options.one[0], int(options.one[1])
        found = measure(key, dtype=options.dtype, batch=options.batch, steps=options.steps)
        print(json.dumps(found))
        return
    environment = quiet_environment(options.threads)
    keys = [(v, int(n)) for n in options.vocabs.split(",") for v in options.variants.split(",")]
    same = [f"--{name}={getattr(options, name)}" for name in ("batch", "dtype", "steps", "threads")]
    rows: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    with options.out.open("a") as results:
        for number in range(options.rounds):
            for key in keys:
                words = [*same, "--one", key[0], str(key[1])]
                cost = run([sys.executable, "-m", "benchmarks.memory", *words], environment)
                row = json.loads(cost.output) | {"key": key, "round": number}
                row |= {"load": os.getloadavg()[0], "dtype": options.dtype}
                rows[key].append(row)
                results.write(json.dumps(row) + "\n")
                results.flush()
                print(json.dumps(row), file=sys.stderr)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {options.dtype}, "
          f"{options.threads} threads, {options.rounds} rounds\n")  # fmt: skip
    print(table(rows))


if __name__ == "__main__":
    main()
