import torch
import torch.nn.functional as F

from cpu_tests.world import run_world
from scalerun.distributed.mesh import ParallelDims, build_meshes
from scalerun.modules.megatron.normalize import normalize_spread


def plain(x, *, eps, center):
    x = x - x.mean(-1, keepdim=True) if center else x
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def work(rank):
    mesh = build_meshes(ParallelDims(tensor=2), "cpu").model.tensor
    own = slice(3 * rank, 3 * rank + 3)
    x = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for center in (True, False):
        leaf, part = x.clone().requires_grad_(), x[..., own].clone().requires_grad_()
        expected = plain(leaf, eps=1e-3, center=center)
        found = normalize_spread(part, mesh, eps=1e-3, center=center)
        torch.testing.assert_close(found, expected[..., own], rtol=1e-12, atol=1e-12)
        expected.exp().sum().backward()
        found.exp().sum().backward()
        torch.testing.assert_close(part.grad, leaf.grad[..., own], rtol=1e-10, atol=1e-12)

    # Far from 0 the sum of squares would have lost the variance.
    far = 1e4 + torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
    found = normalize_spread(far[:, own].contiguous(), mesh, eps=1e-5, center=True)
    expected = F.layer_norm(far.double(), (6,), eps=1e-5)[:, own]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-3)
    half = x[..., own].bfloat16()
    assert normalize_spread(half, mesh, eps=1e-3, center=True).dtype == torch.float32


def test_it_norms_by_the_statistics_of_all_features():
    run_world(2, work)
