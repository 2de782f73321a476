"""Measures one mixture of experts in this process and prints one JSON line.

    python -m benchmarks.moe_worker layer --experts 64 --tokens 16384
    PEERS_DIR=... .../torchscale/bin/python -m benchmarks.moe_worker step --experts 64 --peer

``layer``: forward and backward of one layer (width 256, feed-forward 1024, two experts a token).
``step``: a whole training step of a decoder of four layers, two of them with experts, on 8
sequences of 256 tokens. With ``--peer`` it is TorchScale's, through the harness in ``PEERS_DIR``;
the process then need not have scalerun.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bare_loop import BenchmarkShape

DIM, FFN, BALANCE = 256, 1024, 0.01


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("layer", "step"))
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    if options.peer:
        sys.path.insert(0, os.environ["PEERS_DIR"])
    torch.manual_seed(0)
    if options.what == "layer":
        make = torchscale_layer if options.peer else scalerun_layer
        call = layer_step(make(options.experts), options.tokens)
    else:
        call = training_step(
            BenchmarkShape(layers=4, moe_freq=2, experts=options.experts), peer=options.peer
        )
    call()
    wall, cpu = [], []
    for _ in range(options.steps):
        start, start_cpu = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    row = {
        "wall_ms": round(1e3 * statistics.median(wall), 1),
        "cpu_ms": round(1e3 * statistics.median(cpu), 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    print(json.dumps(row), flush=True)
    os._exit(0)  # a process group of the peer may hold threads


def layer_step(layer: Callable[[Tensor], tuple[Tensor, Tensor]], tokens: int) -> Callable[[], None]:
    """One forward and backward pass on the same random tokens."""
    x_BTD = torch.randn(8, tokens // 8, DIM)
    towards_BTD = torch.randn_like(x_BTD)

    def call() -> None:
        x = x_BTD.clone().requires_grad_()
        y, balance = layer(x)
        torch.autograd.backward((y, BALANCE * balance), (towards_BTD, torch.ones(())))
        for parameter in parameters_of(layer):
            parameter.grad = None

    return call


def parameters_of(layer: Any) -> list[nn.Parameter]:
    """The parameters of a layer or of the layer behind a function."""
    return list(getattr(layer, "module", layer).parameters())


def scalerun_layer(experts: int) -> Any:
    """A layer of scalerun."""
    from scalerun.models.base_model import build_model
    from scalerun.models.transformer_config import TransformerConfig
    from scalerun.modules.block_context import BlockContext

    cfg = TransformerConfig(
        decoder_embed_dim=DIM,
        decoder_attention_heads=8,
        decoder_ffn_embed_dim=FFN,
        decoder_layers=1,
        moe_freq=1,
        moe_expert_count=experts,
        use_xmoe=True,
    ).named("transformer_lm")
    model: Any = build_model(
        cfg, vocab_size=8, padding_idx=None, seed=1, device=torch.device("cpu")
    )
    layer = model.blocks()[0].ffn.train()

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        y, report = layer(x, BlockContext())
        return y, report.loss

    call.module = layer  # type: ignore[attr-defined]
    return call


def torchscale_layer(experts: int) -> Any:
    """TorchScale's layer in the same architecture: no norm inside the experts."""
    from adapters import torchscale as adapter  # type: ignore[import-not-found]

    shape = BenchmarkShape(layers=1, moe_freq=1, experts=experts)
    return adapter.model(shape, subln=False).layers[0].moe_layer.train()


def training_step(shape: BenchmarkShape, *, peer: bool) -> Callable[[], None]:
    """A whole update of either library's decoder on the same random tokens."""
    if peer:
        from adapters import torchscale as adapter
    else:
        from benchmarks.adapters import scalerun as adapter
    tokens = torch.randint(4, shape.vocab, (shape.batch, shape.seq + 1))
    _, step = adapter.build(shape)
    return lambda: step(tokens)


if __name__ == "__main__":
    main()
