"""How fast does greedy decoding run beside Hugging Face's ``generate``?

    python -m benchmarks.generation --batch-sizes 1,8 --rounds 5

Shape S in one process: the same number of prompts and tokens through ``SequenceGenerator`` (the
whole way, with the text of each answer), through the model alone in a loop, and through
``OPTForCausalLM.generate`` of the same sizes, in turn in every round. Needs ``transformers`` beside
scalerun. Prints tokens per second and the ratios of each round; appends JSON lines to ``--out``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.adapters.scalerun import build_gen
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.data.tokenizers.dictionary import Dictionary
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.generation.sequence_generator import SequenceGenerator
from scalerun.models.base_decoder import BaseDecoder

SPECIALS = 4
OURS, LOOP, PEER = "SequenceGenerator", "model alone", "HF generate"
Generate = Callable[[Tensor], Any]


class Letters(BaseTokenizer):
    """A vocabulary without words: token i is a character."""

    def __init__(self, size: int) -> None:
        self.dictionary = Dictionary(size, 0, 1, 2, 3, digest="letters")
        self.files = {}

    def encode(self, text: str) -> list[int]:
        return [SPECIALS + ord(letter) for letter in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(i - SPECIALS) for i in ids if i >= SPECIALS)

    def token_text(self, index: int) -> str:
        return self.decode([index])


def shape_s(batch: int, *, prompt: int, new_tokens: int) -> SimpleNamespace:
    """Shape S of the training benchmark, as an adapter reads it."""
    return SimpleNamespace(
        batch=batch,
        vocab=8192,
        dim=256,
        layers=6,
        heads=8,
        ffn=1024,
        seq=prompt + new_tokens,
        prompt=prompt,
        new_tokens=new_tokens,
        experts=0,
        moe_freq=0,
        segments=(),
    )


def our_ways(shape: Any) -> dict[str, Generate]:
    """The generator, and the loop around the model."""
    model, loop = build_gen(shape)
    assert isinstance(model, BaseDecoder)
    generator = SequenceGenerator(model, Letters(shape.vocab))
    params = SamplingParams(
        temperature=0.0, max_new_tokens=shape.new_tokens, min_new_tokens=shape.new_tokens
    )

    def generate(prompts: Tensor) -> Any:
        # The generator puts the separator in front.
        return generator.generate(prompts[:, 1:].tolist(), [params] * len(prompts))

    return {OURS: generate, LOOP: loop}


def peer(shape: Any) -> Generate:
    """A decoder of the same sizes by transformers."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers: Any = importlib.import_module("transformers")
    config = transformers.OPTConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        word_embed_proj_dim=shape.dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        ffn_dim=shape.ffn,
        max_position_embeddings=shape.seq,
        activation_function="gelu",
        dropout=0.0,
        attention_dropout=0.0,
        attn_implementation="sdpa",
    )
    model = transformers.OPTForCausalLM(config).eval()

    def generate(prompts: Tensor) -> Any:
        with torch.inference_mode():
            return model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=shape.new_tokens,
                min_new_tokens=shape.new_tokens,
                do_sample=False,
                num_beams=1,
                use_cache=True,
            )

    return generate


def measure(generate: Generate, prompts: Tensor) -> tuple[float, float]:
    """Seconds of wall and of CPU time of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    generate(prompts)
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rounds with so many prompts, as records."""
    shape = shape_s(batch, prompt=args.prompt, new_tokens=args.new_tokens)
    torch.manual_seed(1)
    ways = {**our_ways(shape), PEER: peer(shape)}
    prompts = torch.randint(SPECIALS, shape.vocab, (batch, args.prompt))
    for generate in ways.values():
        generate(prompts)
    records = []
    for number in range(args.rounds):
        for name, generate in ways.items():
            wall, cpu = measure(generate, prompts)
            tokens = batch * args.new_tokens
            records.append(
                {
                    "batch": batch,
                    "round": number,
                    "way": name,
                    "threads": torch.get_num_threads(),
                    "load": os.getloadavg()[0],
                    "tokens_per_s": tokens / wall,
                    "tokens_per_cpu_s": tokens / cpu,
                }
            )
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    """Medians, the best, and the ratios to the peer in the same round."""
    lines = [
        "| prompts | | tokens/s: median (best) | per CPU-s: median (best) | of HF's, by round: "
        "median (all) | the best of each, CPU time |",
        "|---|---|---|---|---|---|",
    ]
    for batch in sorted({record["batch"] for record in records}):
        of = {
            way: [r for r in records if r["batch"] == batch and r["way"] == way]
            for way in (OURS, LOOP, PEER)
        }
        for way, mine in of.items():
            pairs = zip(mine, of[PEER], strict=True)
            ratios = [a["tokens_per_cpu_s"] / b["tokens_per_cpu_s"] for a, b in pairs]
            walls, cpus = ([r[key] for r in mine] for key in ("tokens_per_s", "tokens_per_cpu_s"))
            best = max(cpus) / max(r["tokens_per_cpu_s"] for r in of[PEER])
            each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append(
                f"| {batch} | {way} | {statistics.median(walls):,.0f} ({max(walls):,.0f}) | "
                f"{statistics.median(cpus):,.0f} ({max(cpus):,.0f}) | "
                f"{statistics.median(ratios):.2f} ({each}) | {best:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="greedy decoding beside HF generate")
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    records = [each for size in args.batch_sizes.split(",") for each in compare(int(size), args)]
    if args.out is not None:
        with args.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    print(table(records))


if __name__ == "__main__":
    main()
