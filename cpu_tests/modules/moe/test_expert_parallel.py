"""Experts spread over real ranks give what one process gives that has all of them.

Each rank has tokens of its own; the one process sees them batch after batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import scalerun.modules.moe.dispatch as dispatch_module
from cpu_tests.world import run_world
from scalerun.distributed.mesh import ParallelDims, build_meshes
from scalerun.modules.block_context import BlockContext
from scalerun.modules.moe.moe_layer import MoELayer

RANKS = 4
Make = Callable[..., MoELayer]


@dataclass
class Case:
    """A layer, and how it is used."""

    settings: dict[str, Any]
    shapes: list[tuple[int, int]] = field(default_factory=lambda: [(2, 9), (1, 3), (3, 7), (2, 5)])
    padding: tuple[int, ...] = ()
    """Ranks that have nothing but padding."""
    one_expert: bool = False
    """All tokens go to the first expert."""
    recompute: bool = False
    training: bool = True
    few_rows: int = 64
    bfloat16: bool = False

    def tolerance(self) -> dict[str, float]:
        if self.bfloat16:
            return {"rtol": 0.02, "atol": 0.05}
        if self.settings.get("dtype") == torch.float32:
            return {"rtol": 1e-4, "atol": 1e-5}
        return {"rtol": 1e-9, "atol": 1e-12}


CASES = {
    "top2": Case({"second_expert": "all"}),
    "top2 without limit": Case({"eval_capacity_fraction": 1.0}, training=False),
    "random second expert": Case({"norm": "layer_norm", "normalize_before_dropping": True}),
    "top1": Case({"top_k": 1, "norm": "rms_norm", "time_major": True}),
    "xmoe": Case({"gate": "xmoe", "normalize_before_dropping": True}),
    "cosine": Case({"gate": "xmoe_cosine", "second_expert": "sampling"}),
    "padding alone": Case({"second_expert": "all", "norm": "layer_norm"}, padding=(1,)),
    "padding everywhere": Case({"second_expert": "all"}, padding=(0, 1, 2, 3)),
    "one token": Case({"top_k": 1}, shapes=[(1, 1)] * 4),
    "idle experts": Case({"top_k": 1, "norm": "layer_norm"}, one_expert=True, padding=(2,)),
    "recomputed": Case({"gate": "xmoe"}, recompute=True, padding=(3,)),
    "float32 by groups": Case({"dtype": torch.float32, "norm": "layer_norm"}, few_rows=0),
    "float32 by batches": Case({"dtype": torch.float32, "norm": "layer_norm"}, few_rows=1000),
    "bfloat16": Case(
        {"dtype": torch.float32, "norm": "layer_norm", "second_expert": "all"}, bfloat16=True
    ),
    "float32 idle": Case({"dtype": torch.float32, "top_k": 1}, one_expert=True, few_rows=0),
}


def batch(case: Case, rank: int) -> tuple[Tensor, BlockContext]:
    """What a rank sees; some of its tokens are padding."""
    generator = torch.Generator().manual_seed(rank)
    num_samples, num_tokens = case.shapes[rank]
    x = torch.randn(num_samples, num_tokens, 8, generator=generator, dtype=torch.float64)
    x = x.abs() if case.one_expert else x
    padding = torch.rand(num_samples, num_tokens, generator=generator) < 0.2
    if rank in case.padding or num_tokens == 1:
        padding.fill_(rank in case.padding)
    return x.to(case.settings.get("dtype", torch.float64)), BlockContext(padding_BS=padding)


def prepared(layer: MoELayer, case: Case) -> MoELayer:
    if case.one_expert:
        with torch.no_grad():
            layer.router.gate.weight.zero_()
            layer.router.gate.weight[0] = 1.0
    return layer.train(case.training)


def run(layer: MoELayer, case: Case, rank: int) -> dict[str, Tensor]:
    """One rank's tokens forward and backward; parameters' gradients add up in the layer."""
    x, context = batch(case, rank)
    x.requires_grad_()
    torch.manual_seed(100 + rank)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.bfloat16):
        if case.recompute:
            y, report = checkpoint(layer, x, context, use_reentrant=False)
        else:
            y, report = layer(x, context)
    wish = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y.dtype)
    ((y * wish).sum() + 3.0 * report.loss).backward()
    assert x.grad is not None
    return {"y": y.detach(), "loss": report.loss.detach(), "x": x.grad, **report.stats}


def gradients(layer: MoELayer) -> Iterator[tuple[str, Tensor]]:
    """Whole gradients, added up over the ranks."""
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        if hasattr(parameter, "full_tensor"):
            yield name, parameter.grad.full_tensor()
        else:
            yield name, parameter.grad


def compare(case: Case, make: Make, rank: int, mesh: Any, replicas: Any) -> None:
    dispatch_module.FEW_ROWS = case.few_rows
    whole = prepared(make(8, **case.settings), case)
    expected = [run(whole, case, each) for each in range(RANKS)]
    spread = prepared(make(8, mesh=mesh, **case.settings), case)
    assert spread.experts.fc1_weight.to_local().shape[0] == 8 // mesh.size()
    found = run(spread, case, rank)
    torch.testing.assert_close(found, expected[rank], **case.tolerance())
    wanted = dict(gradients(whole))
    for name, gradient in gradients(spread):
        dist.all_reduce(gradient, group=replicas if name.startswith("experts.") else None)
        torch.testing.assert_close(gradient, wanted[name], **case.tolerance())


def test_spread_experts_are_whole_experts(make_layer: Make) -> None:
    """Outputs, losses, statistics and all gradients, at every kind of emptiness."""

    def work(rank: int) -> None:
        for ranks in (4, 2):
            meshes = build_meshes(ParallelDims(shard=RANKS, expert=ranks), "cpu")
            replicas = meshes.sparse["efsdp"].get_group()
            for name, case in CASES.items():
                try:
                    compare(case, make_layer, rank, meshes.model.expert, replicas)
                except AssertionError as error:
                    raise AssertionError(f"{name}, over {ranks} ranks: {error}") from error

    run_world(RANKS, work)
