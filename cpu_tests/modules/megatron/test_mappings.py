import pytest
import torch

from cpu_tests.world import run_world
from scalerun.distributed.collectives import all_gather
from scalerun.distributed.mesh import ParallelDims, build_meshes
from scalerun.modules.megatron.mappings import (
    copy_to,
    enter,
    gather_from,
    gather_from_sequence,
    leave,
    reduce_from,
    reduce_scatter_to_sequence,
    scatter_to,
    scatter_to_sequence,
)

WHOLE, SPREAD, PARTIAL = "whole", "spread", "partial"


def everybody(x, mesh):
    """(ranks, ...): what each rank has."""
    return all_gather(x.detach().unsqueeze(0), mesh, 0)


def product(a, b, kind, mesh):
    """The inner product of what two tensors of all ranks stand for."""
    a, b = everybody(a, mesh), everybody(b, mesh)
    if kind == WHOLE:  # one tensor, whose gradient is as whole
        return (a[0] * b[0]).sum()
    return (a * b).sum()  # the parts are orthogonal


def check_conjugate(mapping, shape, before, after, mesh, dim):
    """<f(x), y> = <x, f*(y)> for random x and y, with f* the backward pass.

    Kinds say what a rank's tensor stands for: ``before`` and ``after`` that of value and gradient.
    A partial gradient of a whole value stands for its sum over the ranks.
    """
    seed = torch.Generator().manual_seed(1)
    own = torch.Generator().manual_seed(2 + mesh.get_local_rank())
    x = torch.randn(shape, generator=seed if before[0] == WHOLE else own, dtype=torch.float64)
    x.requires_grad_()
    y = mapping(x, mesh)
    g = torch.randn(y.shape, generator=seed if after[1] == WHOLE else own, dtype=torch.float64)
    y.backward(g)
    if after == (WHOLE, PARTIAL):
        right = (everybody(y, mesh)[0] * everybody(g, mesh).sum(0)).sum()
    elif after == (WHOLE, WHOLE):
        right = product(y, g, WHOLE, mesh)
    else:
        right = product(y, g, SPREAD, mesh)
    if before == (PARTIAL, WHOLE):
        left = (everybody(x, mesh).sum(0) * everybody(x.grad, mesh)[0]).sum()
    else:
        left = product(x, x.grad, before[0], mesh)
    torch.testing.assert_close(left, right)


def work(rank):
    mesh = build_meshes(ParallelDims(tensor=2), "cpu").model.tensor
    shape, half = (3, 4, 6), (3, 2, 6)
    narrow = (3, 4, 3)
    whole, spread = (WHOLE, WHOLE), (SPREAD, SPREAD)
    partial, used_apart = (PARTIAL, WHOLE), (WHOLE, PARTIAL)
    for mapping, size, before, after in (
        (copy_to, shape, whole, used_apart),
        (reduce_from, shape, partial, whole),
        (scatter_to, shape, whole, spread),
        (gather_from, narrow, spread, whole),
        (scatter_to_sequence, shape, whole, spread),
        (gather_from_sequence, half, spread, used_apart),
        (lambda x, m: gather_from_sequence(x, m, partial_gradient=False), half, spread, whole),
        (reduce_scatter_to_sequence, shape, partial, spread),
        (lambda x, m: enter(x, m, None), shape, whole, used_apart),
        (lambda x, m: enter(x, m, m), half, spread, used_apart),
        (lambda x, m: leave(x, m, None), shape, partial, whole),
        (lambda x, m: leave(x, m, m), shape, partial, spread),
    ):
        check_conjugate(mapping, size, before, after, mesh, 1)
    x = torch.arange(24.0).view(2, 4, 3)
    assert torch.equal(scatter_to_sequence(x, mesh), x[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(gather_from(scatter_to(x.mT.contiguous(), mesh), mesh), x.mT)
    with pytest.raises(ValueError, match="2 ranks cannot share dimension -1"):
        scatter_to(x, mesh)


def test_every_mapping_and_its_gradient_are_conjugate():
    run_world(2, work)


def test_without_an_axis_every_mapping_is_the_identity():
    x = torch.ones(2, 3)
    for mapping in (
        copy_to,
        reduce_from,
        scatter_to,
        gather_from,
        scatter_to_sequence,
        gather_from_sequence,
        reduce_scatter_to_sequence,
    ):
        assert mapping(x, None) is x
    assert enter(x, None, None) is leave(x, None, None) is x
