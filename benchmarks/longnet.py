"""Does LongNet's cost grow with the length, and how far below dense attention is it?

Forward and backward of one decoder with dilated and with dense attention, at several lengths, and
the memory of one whole training step on a very long sequence. Every measurement is a process of its
own; rounds are interleaved. Prints a table and appends JSON lines to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.measured_process import quiet_environment, run
from scalerun.models.base_model import BaseModel, build_model
from scalerun.models.transformer_config import TransformerConfig

VOCAB = 256
SEGMENTS = (512, 2048, 8192, 32768)
RATIOS = (1, 4, 16, 64)
MORE_SEGMENTS, MORE_RATIOS = (131072,), (256,)
"""For sequences longer than four of the longest segment above."""
KEEP_FREED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""glibc otherwise hands back every tensor above 32 MB, and the system clears it anew."""


def make_model(kind: str, length: int, *, recompute: bool) -> BaseModel:
    """Two layers of width 256 with 4 heads, feed-forward 1024, learned positions, tied output."""
    cfg = TransformerConfig(
        decoder_embed_dim=256,
        decoder_attention_heads=4,
        decoder_ffn_embed_dim=1024,
        decoder_layers=2,
        decoder_learned_pos=True,
        share_decoder_input_output_embed=True,
        max_target_positions=length,
        checkpoint_activations=recompute,
    )
    if kind != "dense":
        longer = length > 4 * SEGMENTS[-1]
        cfg.segment_length = [*SEGMENTS, *(MORE_SEGMENTS if longer else ())]
        cfg.dilated_ratio = [*RATIOS, *(MORE_RATIOS if longer else ())]
        cfg.dilated_merge_gradient = kind
    return build_model(
        cfg, vocab_size=VOCAB, padding_idx=None, seed=1, device=torch.device("cpu")
    ).train()


def make_pass(model: BaseModel, length: int) -> Callable[[], None]:
    """Forward and backward on one sequence that never changes."""
    torch.manual_seed(0)
    text = torch.randint(VOCAB, (1, length + 1))

    def forward_and_backward() -> None:
        model.zero_grad()
        logits = model(text[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), text[0, 1:]).backward()

    return forward_and_backward


def measure(kind: str, length: int, *, steps: int) -> dict[str, float]:
    """Medians of some passes after one that warms up; milliseconds and megabytes."""
    forward_and_backward = make_pass(make_model(kind, length, recompute=False), length)
    wall, cpu = [], []
    for _ in range(steps + 1):
        start, cpu_start = time.perf_counter(), time.process_time()
        forward_and_backward()
        wall.append(1e3 * (time.perf_counter() - start))
        cpu.append(1e3 * (time.process_time() - cpu_start))
    return {
        "wall_ms": statistics.median(wall[1:]),
        "cpu_ms": statistics.median(cpu[1:]),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def train_once(kind: str, length: int) -> dict[str, float]:
    """One whole training step, with activation checkpointing: milliseconds and megabytes."""
    model = make_model(kind, length, recompute=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    start = time.perf_counter()
    make_pass(model, length)()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {
        "wall_ms": 1e3 * (time.perf_counter() - start),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def table(rows: list[dict[str, float | str]]) -> str:
    """Medians over the rounds, as Markdown; beside each time the one of dense attention over it."""
    groups: dict[tuple[str, int], list[dict[str, float | str]]] = defaultdict(list)
    for row in rows:
        groups[str(row["kind"]), int(row["length"])].append(row)

    def median(key: tuple[str, int], name: str) -> float:
        return statistics.median(float(row.get(name, "nan")) for row in groups.get(key, [{}]))

    lines = [
        "| attention | tokens | µs a token | dense | CPU µs a token | dense | peak RSS, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, length in sorted(groups):
        cells = [kind, str(length)]
        for name in ("wall_ms", "cpu_ms"):
            own, dense = (median((which, length), name) for which in (kind, "dense"))
            cells += [f"{1e3 * own / length:.1f}", f"{dense / own:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {median((kind, length), 'peak_rss_mb'):.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all lengths, or, as a process of its own, one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="4096,16384,65536")
    parser.add_argument("--kinds", default="torchscale,exact,dense")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--train-once", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--return-freed", action="store_true", help="glibc's own defaults")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("KIND", "TOKENS", "STEPS"), help="internal")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        kind, length, steps = options.one[0], int(options.one[1]), int(options.one[2])
        found = measure(kind, length, steps=steps) if steps else train_once(kind, length)
        print(json.dumps({"kind": kind, "length": length, **found}))
        return
    kinds = options.kinds.split(",")
    jobs = [(kind, int(n), 5) for n in options.lengths.split(",") if n for kind in kinds]
    if options.train_once:
        jobs = [(kind, options.train_once, 0) for kind in kinds]
    environment = quiet_environment(options.threads)
    if not options.return_freed:
        environment |= KEEP_FREED
    rows = []
    for number in range(options.rounds):
        for kind, length, steps in jobs:
            # Dense attention at full length takes a minute; once is enough for a factor of ten.
            if kind == "dense" and length > 32768:
                if number:
                    continue
                steps = 1
            words = ["--threads", str(options.threads), "--one", kind, str(length), str(steps)]
            command = [sys.executable, "-m", "benchmarks.longnet", *words]
            result = json.loads(run(command, environment).output)
            result["load"] = os.getloadavg()[0]
            rows.append(result)
            print(json.dumps(result), file=sys.stderr, flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
