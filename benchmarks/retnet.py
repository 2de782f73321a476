"""Does a RetNet decode in constant memory and at constant speed, beside attention with a cache?

    python -m benchmarks.retnet --tokens 20000 --rounds 3

One sequence is continued greedily by a RetNet and by a decoder with rotary attention of the same
width and depth. Every measurement is a process of its own; rounds are interleaved. Prints a table
and appends JSON lines to ``--out``.
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
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured_process import quiet_environment, run
from scalerun.models.base_decoder import BaseDecoder
from scalerun.models.base_model import build_model
from scalerun.models.retnet import RetNetConfig
from scalerun.models.transformer_config import TransformerConfig
from scalerun.modules.incremental_state import IncrementalState, LayerState

VOCAB = 8192
PROMPT = 32
WINDOW = 500
"""Tokens over which a speed is measured."""
MILESTONES = (1000, 2000, 5000, 10000, 20000)

Row = dict[str, Any]


def make_model(kind: str, length: int) -> BaseDecoder:
    """Six layers of width 256 with about the same number of weights, tied output."""
    cfg: RetNetConfig | TransformerConfig
    if kind == "retnet":
        cfg = RetNetConfig(
            decoder_embed_dim=256,
            decoder_value_embed_dim=432,
            decoder_ffn_embed_dim=432,
            decoder_retention_heads=2,
            decoder_layers=6,
            share_decoder_input_output_embed=True,
            max_target_positions=length,
        )
    else:
        cfg = TransformerConfig(
            decoder_embed_dim=256,
            decoder_attention_heads=8,
            decoder_ffn_embed_dim=1024,
            decoder_layers=6,
            rotary=True,
            share_decoder_input_output_embed=True,
            max_target_positions=length,
        )
    model = build_model(cfg, vocab_size=VOCAB, padding_idx=None, seed=1, device=torch.device("cpu"))
    assert isinstance(model, BaseDecoder)
    return model.eval()


def bytes_of(state: IncrementalState) -> int:
    """What the layers keep."""

    def count(layer: LayerState) -> int:
        tensors = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    return sum(count(layer) for layer in state.layers)


@torch.no_grad()
def measure(kind: str, num_tokens: int, batch_size: int) -> list[Row]:
    """Speed over the last tokens before each milestone, and the process's peak memory there."""
    model = make_model(kind, num_tokens + PROMPT)
    state = model.init_incremental_state(batch_size, num_tokens + PROMPT)
    new = torch.arange(batch_size * PROMPT).reshape(batch_size, PROMPT) % VOCAB
    rows = []
    wall, cpu = time.perf_counter(), time.process_time()
    for count in range(1, num_tokens + 1):
        output = model(new, incremental_state=state, last_token_only=True)
        new = output.logits[:, -1].argmax(-1, keepdim=True)
        if count % WINDOW:
            continue
        now, cpu_now = time.perf_counter(), time.process_time()
        if count in MILESTONES:
            rows.append(
                {
                    "tokens": count,
                    "tokens_per_s": WINDOW * batch_size / (now - wall),
                    "tokens_per_cpu_s": WINDOW * batch_size / (cpu_now - cpu),
                    "state_mb": bytes_of(state) / 2**20,
                    "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                }
            )
        wall, cpu = now, cpu_now
    return rows


def table(rows: list[Row]) -> str:
    """Medians over the rounds, as Markdown."""
    groups: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["kind"], row["batch"], row["tokens"]].append(row)
    names = ("tokens_per_s", "tokens_per_cpu_s", "state_mb", "peak_rss_mb")
    lines = [
        "| model | batch | tokens | tokens/s | tokens per CPU-s | state, MB | peak RSS, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for (kind, batch, tokens), group in sorted(groups.items()):
        cells = [statistics.median(float(row[name]) for row in group) for name in names]
        speed, cpu_speed, state, peak = cells
        lines.append(
            f"| {kind} | {batch} | {tokens} | {speed:.0f} | {cpu_speed:.0f} | {state:.2f} | "
            f"{peak:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure both models, or, as a process of its own, one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--batches", default="1")
    parser.add_argument("--kinds", default="retnet,attention")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "BATCH"), help="internal")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        print(json.dumps(measure(options.one[0], options.tokens, int(options.one[1]))))
        return
    rows: list[Row] = []
    for _ in range(options.rounds):
        for batch in options.batches.split(","):
            for kind in options.kinds.split(","):
                words = ["--threads", str(options.threads), "--tokens", str(options.tokens)]
                command = [sys.executable, "-m", "benchmarks.retnet", *words, "--one", kind, batch]
                found = run(command, quiet_environment(options.threads)).output
                for row in json.loads(found):
                    row |= {"kind": kind, "batch": int(batch), "load": os.getloadavg()[0]}
                    rows.append(row)
                    print(json.dumps(row), file=sys.stderr, flush=True)
                    if options.out:
                        with options.out.open("a") as file:
                            file.write(json.dumps(row) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
