"""The yardstick: the least code that trains the benchmark's shape with plain torch.

A pre-LN decoder on ``scaled_dot_product_attention`` with learned positions and tied embeddings,
AdamW, clipping at norm 1 and the mean cross entropy, on one batch that never changes. Run as a
script it measures itself and prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class BenchmarkShape:
    """Sizes of the model and of a batch."""

    vocab: int = 8192
    dim: int = 256
    layers: int = 6
    heads: int = 8
    ffn: int = 1024
    seq: int = 256
    batch: int = 8
    prompt: int = 0
    new_tokens: int = 0
    experts: int = 0
    moe_freq: int = 0
    segments: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Target tokens of an update."""
        return self.batch * self.seq


class Layer(nn.Module):
    """Attention and a feed-forward network, each on the normed stream."""

    def __init__(self, shape: BenchmarkShape) -> None:
        super().__init__()
        dim = shape.dim
        self.heads = shape.heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.from_heads = nn.Linear(dim, dim)
        self.widen, self.narrow = nn.Linear(dim, shape.ffn), nn.Linear(shape.ffn, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.to_qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.from_heads(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norms[1](x))))


class Decoder(nn.Module):
    """Token numbers (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, shape: BenchmarkShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.dim)
        self.positions = nn.Embedding(shape.seq, shape.dim)
        self.layers = nn.Sequential(*(Layer(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.dim)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.layers(x)), self.tokens.weight)


def make_step(shape: BenchmarkShape, *, fused: bool) -> Callable[[], float]:
    """A function that does one whole update and returns the mean loss in nats."""
    torch.manual_seed(0)
    model = Decoder(shape).train()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(
        params, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused or None
    )
    text = torch.randint(4, shape.vocab, (shape.batch, shape.seq + 1))
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    """Measure some steps after a warm-up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fused", action="store_true", help="AdamW in one kernel")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = BenchmarkShape()
    step = make_step(shape, fused=options.fused)
    for _ in range(options.warmup):
        step()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(options.steps):
        step()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"cpu_s": cpu, "wall_s": wall, "steps": options.steps, "peak_rss_mb": peak}))


if __name__ == "__main__":
    main()
