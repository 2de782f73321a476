"""Mixtures of experts: how cost grows with their number, and beside TorchScale's.

    python -m benchmarks.moe --rounds 3
    PEERS_DIR=... PEERS_HOME=... python -m benchmarks.moe --rounds 3

Every measurement is a new process; rounds are interleaved, so that a slow minute of a shared
machine meets everyone. TorchScale takes part where the harness is: its ``adapters`` in
``PEERS_DIR``, its virtual environment ``venvs/torchscale`` in ``PEERS_HOME``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured_process import quiet_environment, run
from benchmarks.train_command import wait_until_quiet

Key = tuple[str, int, bool]
"""What is measured, how many experts, and whether it is the peer."""

OURS: list[Key] = [(what, experts, False) for what in ("layer", "step") for experts in (8, 64, 256)]
THEIRS: list[Key] = [("layer", 64, True), *(("step", experts, True) for experts in (8, 64, 256))]
"""TorchScale's layer needs gigabytes for 16,384 tokens, so it is measured once."""


def main() -> None:
    """Measure in rounds, append JSON lines, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed calls of a measurement")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--wait", type=float, default=60, help="seconds to wait for a quiet machine"
    )
    parser.add_argument("--out", type=Path, default=Path("moe.jsonl"), help="appended to")
    options = parser.parse_args()
    environment = quiet_environment(options.threads)
    keys = OURS + (THEIRS if "PEERS_DIR" in environment else [])
    rows: dict[Key, list[dict[str, Any]]] = {key: [] for key in keys}
    with options.out.open("a") as results:
        for number in range(options.rounds):
            for key in keys:
                wait_until_quiet(options.wait)
                row = measure(key, steps=options.steps, environment=environment)
                row |= {"key": key, "round": number, "load": os.getloadavg()[0]}
                rows[key].append(row)
                results.write(json.dumps(row) + "\n")
                results.flush()
                print(json.dumps(row), file=sys.stderr)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, "
          f"{options.threads} threads, {options.rounds} rounds\n")  # fmt: skip
    print(table(rows))


def measure(key: Key, *, steps: int, environment: dict[str, str]) -> dict[str, Any]:
    """What one process reports."""
    what, experts, peer = key
    python = sys.executable
    if peer:
        python = str(Path(environment["PEERS_HOME"]) / "venvs" / "torchscale" / "bin" / "python")
    words = [what, "--experts", str(experts), "--steps", str(steps), *(["--peer"] if peer else [])]
    cost = run([python, "-m", "benchmarks.moe_worker", *words], environment)
    found: dict[str, Any] = json.loads(cost.output.splitlines()[-1])
    return found


def table(rows: dict[Key, list[dict[str, Any]]]) -> str:
    """Medians over rounds as a Markdown table; times beside ours with 8 experts and beside ours."""

    def median(key: Key, name: str) -> float:
        return statistics.median(row[name] for row in rows[key])

    lines = [
        "| | experts | ms | CPU ms | peak RSS, MB | / 8 experts | / scalerun |",
        "|---|---|---|---|---|---|---|",
    ]
    for key in rows:
        what, experts, peer = key
        name = f"{what}, {'torchscale' if peer else 'scalerun'}"
        wall, cpu, memory = (median(key, n) for n in ("wall_ms", "cpu_ms", "peak_rss_mb"))
        growth = "" if peer else f"{wall / median((what, 8, False), 'wall_ms'):.2f}"
        beside = f"{wall / median((what, experts, False), 'wall_ms'):.2f}" if peer else ""
        lines.append(
            f"| {name} | {experts} | {wall:,.0f} | {cpu:,.0f} | {memory:,.0f} "
            f"| {growth} | {beside} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
