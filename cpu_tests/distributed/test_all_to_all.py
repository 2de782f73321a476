"""What goes from rank to rank arrives in order, and gradients find the way back."""

import torch

from cpu_tests.world import run_world
from scalerun.distributed.collectives import all_to_all, all_to_all_rows
from scalerun.distributed.mesh import ParallelDims, build_meshes

SENT = [[1, 0, 2], [0, 0, 3], [0, 0, 0]]
"""Rows that each rank sends to each: the middle one receives nothing, the last one sends none."""


def test_rows_arrive_by_sender_and_their_gradients_return():
    def work(rank):
        mesh = build_meshes(ParallelDims(shard=3, expert=3), "cpu").model.expert
        sent, received = SENT[rank], [row[rank] for row in SENT]
        assert all_to_all(torch.tensor(sent), mesh).tolist() == received
        rows = 10.0 * rank + torch.arange(float(sum(sent))).unsqueeze(1).repeat(1, 2)
        rows.requires_grad_()
        arrived = all_to_all_rows(rows, mesh, sent=sent, received=received)
        (arrived * (rank + 1)).sum().backward()
        return arrived[:, 0].tolist(), rows.grad[:, 0].tolist()

    arrived, gradients = zip(*run_world(3, work), strict=True)
    assert arrived == ([0.0], [], [1.0, 2.0, 10.0, 11.0, 12.0])
    assert gradients == ([1.0, 3.0, 3.0], [3.0, 3.0, 3.0], [])
