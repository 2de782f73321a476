import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cpu_tests.world import run_world
from scalerun.distributed.collectives import all_gather
from scalerun.distributed.mesh import ParallelDims, build_meshes
from scalerun.modules.megatron.random import rank_stream, spread_dropout

CPU = torch.device("cpu")


def work(rank):
    mesh = build_meshes(ParallelDims(tensor=2), "cpu").model.tensor
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
    for dim in (1, 2, -1):
        torch.manual_seed(5)
        expected, after = F.dropout(x, 0.4), torch.rand(3)
        torch.manual_seed(5)
        part = spread_dropout(x.chunk(2, dim)[rank].contiguous(), 0.4, mesh, dim)
        assert torch.equal(part, expected.chunk(2, dim)[rank])
        assert torch.equal(torch.rand(3), after)

    torch.manual_seed(5)
    with rank_stream(mesh, CPU):
        first = torch.rand(20)
    between = torch.rand(20)
    with rank_stream(mesh, CPU):
        second = torch.rand(1)
    after = torch.rand(20)
    ours = torch.stack([all_gather(x, mesh, 0) for x in (first, between, after)])
    one, other = ours.chunk(2, 1)
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[1:], other[1:])
    assert first[0] != second[0]

    def draws(x):
        with rank_stream(mesh, CPU):
            x = F.dropout(x, 0.5)
        return F.dropout(x, 0.5)

    gradients = []
    for run in (draws, lambda x: checkpoint(draws, x, use_reentrant=False)):
        torch.manual_seed(5)
        leaf = torch.ones(50, requires_grad=True)
        run(leaf).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
    assert len(gradients[0].unique()) > 1


def test_masks_do_not_depend_on_the_ranks_and_streams_do():
    run_world(2, work)


def test_without_an_axis_a_stream_is_the_default_one():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with rank_stream(None, CPU):
        assert torch.equal(torch.rand(3), expected)
