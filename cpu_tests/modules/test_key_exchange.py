"""Ranks that each have a slice of every sequence attend as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import DeviceMesh, init_device_mesh

from cpu_tests.world import run_world
from scalerun.modules.dilation import Dilation
from scalerun.modules.key_exchange import KeyExchange
from scalerun.modules.merged_attention import MERGE_GRADIENTS, merge

HEADS = 3
DILATIONS = {
    "within ranks": (32, Dilation((2, 4), (1, 2))),
    "within ranks and across all": (32, Dilation((4, 32), (1, 2))),
    "across all, then across two and within": (32, Dilation((32, 16, 8), (1, 2, 1))),
    "across two ranks": (32, Dilation((16,), (2,), head_offset="mod")),
    "within ranks, across two and across all": (48, Dilation((6, 24, 48), (1, 3, 6))),
    "longer than the sequence": (24, Dilation((3, 1000), (1, 2), head_offset="mod")),
    "tokens that no branch keeps": (16, Dilation((16,), (4,))),
    "a branch twice": (16, Dilation((8, 8), (2, 2))),
    "three ranks, and one that is left": (16, Dilation((4, 12), (1, 2))),
}
"""Tokens and branches; all of them fit slices of 4 ranks, and all but the last those of 2."""


class Member:
    """A rank of an axis, for what sends nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.ranks = rank, size

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return self.rank


def exchanges(size: int, ranks_per_segment: int, *, causal: bool) -> list[KeyExchange]:
    members: list[Any] = [Member(rank, size) for rank in range(size)]
    return [
        KeyExchange(member, ranks_per_segment=ranks_per_segment, causal=causal)
        for member in members
    ]


def test_keys_come_from_earlier_ranks_of_the_segment_or_from_all_others() -> None:
    causal = exchanges(5, 3, causal=True)
    assert [each.lenders for each in causal] == [[], [0], [0, 1], [], [3]]
    both = exchanges(5, 3, causal=False)
    assert [each.lenders for each in both] == [[1, 2], [0, 2], [0, 1], [4], [3]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks_per_segment", [1, 2, 3, 4, 9])
def test_whoever_borrows_is_lent_to(ranks_per_segment: int, causal: bool) -> None:
    ranks = exchanges(4, ranks_per_segment, causal=causal)
    for i, one in enumerate(ranks):
        for j, other in enumerate(ranks):
            assert (j in one.lenders) == (i in other.borrowers)


def inputs(num_tokens: int) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (2, num_tokens, HEADS, 4)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(4)]


def results(
    dilation: Dilation, whole: list[Tensor], part: slice, mesh: DeviceMesh | None, **how: Any
) -> list[Tensor]:
    """The output of some tokens, and the gradients of their queries, keys and values."""
    q, k, v, grad = (x[:, part].clone() for x in whole)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    segments = dilation.segments(q, causal=how["causal"], sequence_mesh=mesh)
    merged = merge(q, k, v, segments, merge_gradient=how["merge_gradient"])
    return [merged, *torch.autograd.grad(merged, (q, k, v), grad)]


def compare(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    for name, (num_tokens, dilation) in DILATIONS.items():
        length = num_tokens // size
        if not dilation.fits(length, size):
            continue
        own, whole = slice(rank * length, (rank + 1) * length), inputs(num_tokens)
        for causal in (True, False):
            for merge_gradient in MERGE_GRADIENTS:
                how: dict[str, Any] = {"causal": causal, "merge_gradient": merge_gradient}
                alone = results(dilation, whole, slice(None), None, **how)
                shared = results(dilation, whole, own, mesh, **how)
                torch.testing.assert_close(
                    shared,
                    [x[:, own] for x in alone],
                    rtol=1e-11,
                    atol=1e-11,
                    msg=lambda text, name=name, how=how: f"{name} {how} on rank {rank}: {text}",
                )
    check_dropped_weights(mesh)


def check_dropped_weights(mesh: DeviceMesh) -> None:
    """The output is linear in the values, with the weights that are left forward and backward."""
    torch.manual_seed(3)
    rank, length = mesh.get_local_rank(), 16 // mesh.size()
    q, k, v, grad = (x[:, rank * length : (rank + 1) * length] for x in inputs(16))
    v = v.clone().requires_grad_()
    segments = Dilation((16,), (1,)).segments(q, causal=False, sequence_mesh=mesh)
    quiet, merged = (merge(q, k, v, segments, dropout=rate) for rate in (0.0, 0.5))
    assert not torch.allclose(merged, quiet)
    (v_grad,) = torch.autograd.grad(merged, v, grad)
    sums = torch.stack(((merged * grad).sum(), (v_grad * v).sum())).detach()
    torch.distributed.all_reduce(sums)
    torch.testing.assert_close(sums[0], sums[1])


@pytest.mark.parametrize("size", [2, 4])
def test_slices_give_the_numbers_of_the_whole_sequence(size: int) -> None:
    run_world(size, compare, size)
