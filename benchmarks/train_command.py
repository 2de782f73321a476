"""The real ``scalerun.cli.train`` beside a bare training loop, and beside peers if there are any.

    python -m benchmarks.train_command --rounds 5
    PEERS_DIR=... PEERS_HOME=... python -m benchmarks.train_command --peers plain,torchscale

Training runs twice in each round, for few and for many updates; the difference is free of
start-up. Rounds are interleaved, so that a slow minute of a shared machine meets everyone. CPU time
is what to compare there; wall time says little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapters.scalerun import model_flags, optimizer_flags
from benchmarks.bare_loop import BenchmarkShape
from benchmarks.measured_process import quiet_environment, run
from scalerun.data.tokenizers.tokenizer import load_tokenizer

HERE = Path(__file__).resolve().parent
SHAPE = BenchmarkShape()
CORPUS = HERE.parent / "projects" / "quickstart" / "data"
TRAIN = "scalerun train"
PEER_VENVS = {"plain": "base"}
"""Virtual environments of the harness that are not called like their peer."""

Row = dict[str, Any]


def main() -> None:
    """Measure in rounds, append JSON lines, print a table."""
    options = parse_options()
    environment = quiet_environment(options.threads)
    tokenizer = make_tokenizer(options.cache, options.corpus, environment)
    contestants = choose_contestants(options, tokenizer, environment)
    rows: list[Row] = []
    with options.out.open("a") as results:
        for number in range(options.rounds):
            for name, measure in contestants.items():
                wait_until_quiet(options.wait)
                row = {"name": name, "round": number, "load": os.getloadavg()[0], **measure()}
                row["tokens_per_cpu_s"] = SHAPE.tokens * row["steps"] / row["cpu_s"]
                row["tokens_per_s"] = SHAPE.tokens * row["steps"] / row["wall_s"]
                rows.append(row)
                results.write(json.dumps(row) + "\n")
                results.flush()
                print(json.dumps(row), file=sys.stderr)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, "
          f"{options.threads} threads, {options.rounds} rounds\n")  # fmt: skip
    print(table(rows))
    print(f"\n{describe_pipeline(options, tokenizer, environment)}")


def parse_options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", type=int, default=5, help="updates of the short run")
    parser.add_argument("--long", type=int, default=45, help="updates of the long run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--wait", type=float, default=60, help="seconds to wait for a quiet machine"
    )
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="folder of text to train on")
    parser.add_argument("--cache", type=Path, default=home / "scalerun-benchmarks")
    parser.add_argument("--out", type=Path, default=Path("train_command.jsonl"))
    parser.add_argument("--peers", default="plain", help="peers of the harness, with commas")
    peers = os.environ.get("PEERS_DIR")
    parser.add_argument("--peers-dir", type=Path, default=Path(peers) if peers else None)
    parser.add_argument("--peers-home", default=os.environ.get("PEERS_HOME"))
    options = parser.parse_args()
    if options.peers_dir is not None and not options.peers_home:
        parser.error("--peers-dir needs --peers-home, the folder of the peers' environments")
    return options


def make_tokenizer(cache: Path, corpus: Path, environment: dict[str, str]) -> Path:
    """A tokenizer of the corpus whose vocabulary has the size of the shape's; kept in ``cache``."""
    path = cache / f"vocabulary_{SHAPE.vocab}.model"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        size = ("--vocab-size", str(SHAPE.vocab))
        module = "scalerun.cli.train_tokenizer"
        run([sys.executable, "-m", module, str(corpus), *size, "--output", str(path)], environment)
    found = len(load_tokenizer(str(path)).dictionary)
    if found != SHAPE.vocab:
        raise SystemExit(f"{path} has {found} symbols instead of {SHAPE.vocab}; remove it")
    return path


def choose_contestants(
    options: argparse.Namespace, tokenizer: Path, environment: dict[str, str]
) -> dict[str, Callable[[], Row]]:
    """What is measured, by the name in the table."""
    steps = options.long - options.short

    def bare_loop(*flags: str) -> Row:
        command = [sys.executable, str(HERE / "bare_loop.py"), "--steps", str(steps), *flags]
        command += ["--threads", str(options.threads)]
        row: Row = json.loads(run(command, environment).output)
        return row

    def peer(name: str) -> Row:
        venv = PEER_VENVS.get(name, name)
        python = Path(options.peers_home) / "venvs" / venv / "bin" / "python"
        command = [str(python), str(options.peers_dir / "worker.py"), "--peer", name]
        command += ["--shape", "S", "--steps", str(steps), "--warmup", str(options.short)]
        command += ["--threads", str(options.threads)]
        found = json.loads(run(command, environment).output.splitlines()[-1])
        cpu, wall = sum(found["cpu_ms"]) / 1e3, sum(found["step_ms"]) / 1e3
        return {"cpu_s": cpu, "wall_s": wall, "steps": steps, "peak_rss_mb": found["peak_rss_mb"]}

    contestants: dict[str, Callable[[], Row]] = {
        TRAIN: lambda: measure_training(options, tokenizer, environment),
        "bare loop": bare_loop,
        "bare loop, fused AdamW": lambda: bare_loop("--fused"),
    }
    if options.peers_dir is not None:
        for name in options.peers.split(","):
            contestants[name] = lambda name=name: peer(name)  # type: ignore[misc]
    return contestants


def train_flags(options: argparse.Namespace, tokenizer: Path, save_dir: Path) -> list[str]:
    """The words behind ``scalerun.cli.train``, without the number of updates."""
    return [
        *(str(options.corpus), "--task", "streaming_language_modeling"),
        *("--tokenizer", str(tokenizer), "--cache-dir", str(options.cache / "tokens")),
        *(*model_flags(SHAPE), *optimizer_flags()),
        *("--cpu", "--no-save", "--disable-validation", "--log-format", "none"),
        *("--save-dir", str(save_dir)),
    ]


def measure_training(
    options: argparse.Namespace, tokenizer: Path, environment: dict[str, str]
) -> Row:
    """Cost of the updates in which a long run exceeds a short one."""
    costs = []
    for updates in (options.short, options.long):
        folder = Path(tempfile.mkdtemp())
        try:
            words = train_flags(options, tokenizer, folder / "run")
            command = [sys.executable, "-m", "scalerun.cli.train", *words]
            costs.append(run([*command, "--max-update", str(updates)], environment))
        finally:
            shutil.rmtree(folder)
    short, long = costs
    return {
        "cpu_s": long.cpu_s - short.cpu_s,
        "wall_s": long.wall_s - short.wall_s,
        "steps": options.long - options.short,
        "peak_rss_mb": long.peak_rss_mb,
        "start_up_cpu_s": short.cpu_s,
    }


def describe_pipeline(
    options: argparse.Namespace, tokenizer: Path, environment: dict[str, str]
) -> str:
    """One sentence on the share of a run's time that goes to making batches."""
    folder = Path(tempfile.mkdtemp())
    try:
        words = train_flags(options, tokenizer, folder / "run")
        command = [sys.executable, str(HERE / "timed_train.py"), *words]
        output = run([*command, "--max-update", str(options.long)], environment).output
    finally:
        shutil.rmtree(folder)
    found = json.loads(output.splitlines()[-1])
    return (
        f"data pipeline: {found['loader_cpu_ms']:.2f} ms of {found['update_cpu_ms']:.1f} ms of CPU "
        f"time in an update ({100 * found['loader_cpu_ms'] / found['update_cpu_ms']:.2f} %)"
    )


def wait_until_quiet(limit: float, busy_share: float = 0.15) -> None:
    """Wait until others use little of the machine, but no longer than ``limit`` seconds."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        before = cpu_ticks()
        time.sleep(2.0)
        total, idle = (after - old for after, old in zip(cpu_ticks(), before, strict=True))
        if 1 - idle / max(total, 1) <= busy_share:
            return


def cpu_ticks() -> tuple[int, int]:
    """Ticks of all processors since the start of the machine, and the idle ones among them."""
    values = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(values), values[3] + values[4]


def table(rows: list[Row]) -> str:
    """Medians over the rounds as Markdown; a ratio compares two measurements of one round."""
    lines = [
        "| | tokens per CPU-s: median (min-max) | train / this: median (min-max) "
        "| tokens/s: median | peak RSS, MB |",
        "|---|---|---|---|---|",
    ]
    names = list(dict.fromkeys(row["name"] for row in rows))
    rate = {name: column(rows, name, "tokens_per_cpu_s") for name in names}
    for name in names:
        values = rate[name]
        ratios = [mine / other for mine, other in zip(rate[TRAIN], values, strict=True)]
        wall = statistics.median(column(rows, name, "tokens_per_s"))
        lines.append(
            f"| {name} | {statistics.median(values):,.0f} ({min(values):,.0f}-{max(values):,.0f}) "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
            f"| {wall:,.0f} | {max(column(rows, name, 'peak_rss_mb')):,.0f} |"
        )
    return "\n".join(lines)


def column(rows: list[Row], name: str, key: str) -> list[float]:
    """One number of each round."""
    return [float(row[key]) for row in rows if row["name"] == name]


if __name__ == "__main__":
    main()
