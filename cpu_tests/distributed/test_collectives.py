import pytest
import torch

from cpu_tests.world import run_world
from scalerun.distributed.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    alone,
    exchange,
    itself,
    own_part,
    reduce_scatter,
)
from scalerun.distributed.mesh import ParallelDims, build_meshes


def work(rank):
    mesh = build_meshes(ParallelDims(tensor=2), "cpu").model.tensor
    assert not alone(mesh)
    x = torch.arange(24.0).view(2, 4, 3)
    assert torch.equal(all_reduce(x * (rank + 1), mesh), 3 * x)
    assert torch.equal(all_reduce(x * (rank + 1), mesh, largest=True), 2 * x)
    for dim in (0, 1, -2):
        part = x.chunk(2, dim)[rank]
        assert torch.equal(own_part(x, mesh, dim), part)
        assert torch.equal(all_gather(part, mesh, dim), x)
        assert torch.equal(reduce_scatter(x * (rank + 1), mesh, dim), 3 * part)
        assert own_part(x, mesh, dim).untyped_storage().nbytes() == part.numel() * 4
    with pytest.raises(ValueError, match="2 ranks cannot share dimension 2"):
        reduce_scatter(x, mesh, 2)
    assert all_to_all(torch.tensor([rank, 10 + rank]), mesh).tolist() == [10 * rank, 10 * rank + 1]

    leaf = x.clone().requires_grad_()
    y = exchange(leaf, mesh, 0, there=itself, back=all_reduce)
    assert torch.equal(y, leaf)
    (y * (rank + 1)).sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(x, 3.0))


def test_what_each_rank_gets():
    run_world(2, work)


def test_a_rank_without_an_axis_is_alone():
    assert alone(None)
