import pytest
import torch
import torch.nn.functional as F

from cpu_tests.world import run_world
from scalerun.distributed.mesh import ParallelDims, build_meshes
from scalerun.modules import row_blocks
from scalerun.modules.megatron.cross_entropy import (
    vocab_parallel_cross_entropy_sum,
    vocab_parallel_loss_and_gradient,
)

IGNORED = -100


def work(rank):
    mesh = build_meshes(ParallelDims(tensor=2), "cpu").model.tensor
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 7, 10, generator=generator) * 4 + 50
    targets = torch.randint(0, 10, (5, 7), generator=generator)
    targets[::2, ::3] = IGNORED
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), targets.flatten(), reduction="sum")
    (expected * 0.3).backward()
    own = slice(5 * rank, 5 * rank + 5)
    for elements in (1, 40, 2**18):
        row_blocks.BLOCK_ELEMENTS["cpu"] = elements
        for overwrite in (False, True):
            part = logits[..., own].clone().requires_grad_()
            kept = part.detach().clone()
            computed = part * 1.0
            loss = vocab_parallel_cross_entropy_sum(
                computed, targets, mesh, ignore_index=IGNORED, overwrite_logits=overwrite
            )
            assert loss.dtype == torch.float32
            (loss * 0.3).backward(retain_graph=True)
            torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
            torch.testing.assert_close(
                part.grad.double(), exact.grad[..., own], rtol=1e-5, atol=1e-6
            )
            assert torch.equal(part.detach(), kept)
            assert torch.equal(computed.detach(), part.grad if overwrite else kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    half = logits[..., own].bfloat16().requires_grad_()
    loss = vocab_parallel_cross_entropy_sum(half, targets, mesh, ignore_index=IGNORED)
    wide = F.cross_entropy(
        logits.bfloat16().double().flatten(0, 1), targets.flatten(), reduction="sum"
    )
    torch.testing.assert_close(loss.double(), wide, rtol=1e-6, atol=0)
    loss.backward()
    assert half.grad.dtype == torch.bfloat16

    part = logits[..., own].flatten(0, 1).clone()
    loss = vocab_parallel_loss_and_gradient(
        part, targets.flatten(), mesh, ignore_index=IGNORED, overwrite_logits=True
    )
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        part.double() * 0.3, exact.grad[..., own].flatten(0, 1), rtol=1e-5, atol=1e-6
    )
    kept = part.clone()
    vocab_parallel_loss_and_gradient(
        part, targets.flatten(), mesh, ignore_index=IGNORED, overwrite_logits=False
    )
    assert torch.equal(part, kept)

    nothing = torch.full((5, 7), IGNORED)
    part = logits[..., own].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy_sum(part, nothing, mesh, ignore_index=IGNORED)
    loss.backward()
    assert loss == 0
    assert not part.grad.any()


def test_it_is_cross_entropy_of_the_whole_vocabulary():
    run_world(2, work)
