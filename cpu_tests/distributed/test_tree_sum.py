"""One sum, whatever the number of ranks: to the bit."""

import torch
import torch.distributed as dist

from cpu_tests.world import run_world
from scalerun.distributed.tree_sum import (
    TreeReduceScatter,
    TreeSum,
    all_reduce_tree,
    sum_replicated,
)

BATCHES = 8
SIZE = 12


def batch_gradients():
    generator = torch.Generator().manual_seed(5)
    scales = 10.0 ** torch.randint(-4, 5, (BATCHES, SIZE), generator=generator)
    return torch.randn(BATCHES, SIZE, generator=generator) * scales


def tree(parts):
    """The sum of a power of 2 of tensors, by neighbours."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def summed(size, rank, over_ranks):
    param = torch.nn.Parameter(torch.zeros(SIZE))
    sums = TreeSum([param], over_ranks(param))
    grads = batch_gradients()
    for j in range(BATCHES // size):
        with sums.batch(last=False):
            param.grad = grads[j * size + rank].clone()
    sums.finish()
    return param.grad


def test_the_order_of_addition_matters_here():
    grads = batch_gradients()
    assert not torch.equal(tree(list(grads)), sum(grads))


def test_one_two_and_four_ranks_give_the_bits_of_the_tree():
    expected = tree(list(batch_gradients()))
    assert torch.equal(summed(1, 0, lambda param: lambda: None), expected)

    def work(rank):
        size = dist.get_world_size()
        return summed(size, rank, lambda param: sum_replicated([param], dist.group.WORLD))

    for size in (2, 4):
        for found in run_world(size, work):
            assert torch.equal(found, expected)


def test_what_is_scattered_is_what_is_reduced():
    def work(rank):
        whole = batch_gradients()[rank]
        reduced = all_reduce_tree(whole.clone(), dist.group.WORLD)
        part = torch.empty(SIZE // 4)
        TreeReduceScatter()(part, whole, dist.group.WORLD, dist.ReduceOp.SUM)
        return reduced, part

    results = run_world(4, work)
    expected = tree(list(batch_gradients()[:4]))
    assert all(torch.equal(reduced, expected) for reduced, _ in results)
    assert torch.equal(torch.cat([part for _, part in results]), expected)


def test_a_number_of_batches_that_is_no_power_of_2_has_one_order_too():
    grads = batch_gradients()[:6]
    param = torch.nn.Parameter(torch.zeros(SIZE))
    sums = TreeSum([param], lambda: None)
    for grad in grads:
        with sums.batch(last=False):
            param.grad = grad.clone()
    sums.finish()
    assert torch.equal(param.grad, tree(list(grads[:4])) + tree(list(grads[4:])))
