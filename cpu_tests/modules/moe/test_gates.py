from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from cpu_tests.world import run_world
from scalerun.distributed.mesh import ParallelDims, build_meshes
from scalerun.modules.constraint import constrain
from scalerun.modules.init import initialize, normal
from scalerun.modules.moe.gates import CosineGate, Gate, LinearGate, XMoEGate


def made(kind: type[LinearGate] | type[XMoEGate] | type[CosineGate], experts: int = 6) -> Gate:
    gate = kind(8, experts, init=normal(0.5))
    initialize(gate, 1)
    return gate.double()


@pytest.fixture
def x_SD() -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).double()


def test_the_linear_gate_is_a_product(x_SD: Tensor) -> None:
    gate = made(LinearGate)
    assert torch.equal(gate(x_SD), x_SD @ gate.weight.T)


def test_the_xmoe_gate_normalises_the_experts_but_not_the_token(x_SD: Tensor) -> None:
    gate = made(XMoEGate).eval()
    reduced = x_SD @ gate.reduction.T
    for s in range(5):
        for e in range(6):
            row = gate.expert_rows[e]
            expected = reduced[s] @ row / row.norm()
            torch.testing.assert_close(gate(x_SD)[s, e], expected)
    torch.testing.assert_close(gate(3.0 * x_SD), 3.0 * gate(x_SD))


def test_the_constraint_of_the_xmoe_gate_is_one_norm_for_all_rows(x_SD: Tensor) -> None:
    gate = made(XMoEGate).float().train()
    fresh = gate.expert_rows.detach().clone()
    torch.testing.assert_close(fresh.norm(dim=-1), torch.full((6,), 0.32))
    before = gate(x_SD.float())
    assert torch.equal(gate.expert_rows, fresh)
    constrain(nn.Sequential(gate))
    torch.testing.assert_close(gate.expert_rows, fresh * 1.5 / 0.32)
    torch.testing.assert_close(gate(x_SD.float()), before)
    written = gate.expert_rows.detach().clone()
    constrain(nn.Sequential(gate))
    assert torch.equal(gate.expert_rows, written)


def test_constrained_after_a_step_a_gate_learns_what_torchscales_learns_from_each_forward(
    x_SD: Tensor,
) -> None:
    """Two batches make an update."""
    found = []
    for in_forward in (True, False):
        gate = made(XMoEGate).float().train()
        optimizer = torch.optim.AdamW(gate.parameters(), lr=0.05, weight_decay=0.1)
        constrain(gate)
        for _ in range(5):
            for scale in (1.0, 0.5):
                if in_forward:
                    gate.constrain()
                gate(scale * x_SD.float()).softmax(-1)[:, 0].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not in_forward:
                constrain(gate)
        gate.constrain()
        found.append([parameter.detach().clone() for parameter in gate.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_constraint_of_sharded_rows_is_that_of_the_whole_ones() -> None:
    """Over more ranks than divide the rows, and without sending anything."""

    def work(rank: int) -> tuple[bool, int]:
        whole, sharded = made(XMoEGate), made(XMoEGate)
        whole.constrain()
        fully_shard(sharded, mesh=build_meshes(ParallelDims(shard=4), "cpu").dense["dp_shard"])
        with CommDebugMode() as sent:
            constrain(sharded)
        rows = sharded.expert_rows.full_tensor()
        return torch.equal(rows, whole.expert_rows), sent.get_total_counts()

    assert run_world(4, work) == [(True, 0)] * 4


def test_the_gradient_of_a_row_has_the_scale_of_norm_one_and_a_half(x_SD: Tensor) -> None:
    gate = made(XMoEGate)
    gate.constrain()
    logit = gate(x_SD)[0, 2]
    (gradient,) = torch.autograd.grad(logit, gate.expert_rows)
    unit = gate.expert_rows[2] / gate.expert_rows[2].norm()
    reduced = gate.reduction @ x_SD[0]
    expected = (reduced - unit * (unit @ reduced)) / 1.5
    torch.testing.assert_close(gradient[2], expected, rtol=1e-5, atol=1e-8)


def test_the_cosine_gate_is_a_cosine_over_a_temperature(x_SD: Tensor) -> None:
    gate = made(CosineGate).train()
    assert gate.log_temperature.exp().item() == pytest.approx(0.3)
    reduced = x_SD @ gate.reduction.T
    cosine = torch.nn.functional.cosine_similarity(reduced[:, None], gate.expert_rows[None], dim=-1)
    torch.testing.assert_close(gate(x_SD), cosine / 0.3, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(gate(3.0 * x_SD), gate(x_SD))
    with torch.no_grad():
        gate.log_temperature.fill_(math.log(2.0))
    torch.testing.assert_close(gate(x_SD), cosine / 2.0)


@pytest.mark.parametrize("experts", [1, 2, 5, 32])
def test_the_cosine_gate_is_half_as_wide_as_there_are_experts(experts: int) -> None:
    assert made(CosineGate, experts).reduction.shape == (max(experts // 2, 2), 8)


def test_active_weights_are_the_matrices() -> None:
    assert made(LinearGate).num_active_weights() == 48
    assert made(XMoEGate).num_active_weights() == 16 * 8 + 6 * 16
    assert made(CosineGate).num_active_weights() == 3 * 8 + 6 * 3
