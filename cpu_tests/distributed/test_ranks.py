"""Decisions that ranks make together."""

import pytest
import torch
import torch.distributed as dist

from cpu_tests.world import run_world
from scalerun.dataclass.errors import UserError
from scalerun.distributed.mesh import ParallelDims, build_meshes
from scalerun.distributed.ranks import ALONE, Control, Ranks


def test_a_single_rank_agrees_with_itself():
    control = ALONE.control
    assert control.max(3, -1) == [3, -1]
    assert control.gather("x") == ["x"]
    assert control.from_main(5) == 5
    assert control.on_main(lambda: 7) == 7
    assert torch.equal(ALONE.sum_over_data(torch.ones(2)), torch.ones(2))
    with pytest.raises(UserError, match="no"):
        control.together(lambda: fail("no"))


def fail(message):
    raise UserError(message)


def named(error):
    """The ranks that an error is said to be of, and what it says."""
    return getattr(error, "__notes__", []), str(error)


def test_ranks_agree():
    def work(rank):
        control = Control(rank, 4, dist.group.WORLD)
        dims = ParallelDims(shard=2, tensor=2)
        ranks = Ranks(dims, control=control, meshes=build_meshes(dims, "cpu"))
        found = {
            "max": control.max(rank, -rank),
            "any": (control.any(rank == 2), control.any(False)),
            "gather": control.gather(rank * rank),
            "main": (control.from_main(rank), control.on_main(lambda: f"rank {rank}")),
            "data": (ranks.data_rank, ranks.data_size, ranks.is_main),
            # Neighbours on the tensor axis see the same tokens, which count once.
            "sum": ranks.sum_over_data(torch.tensor([10.0 ** (rank // 2)])).item(),
        }
        dims = ParallelDims(replicate=2, sequence=2, tensor=2)
        meshes = build_meshes(dims, "cpu")
        ranks = Ranks(dims, control=control, meshes=meshes)
        assert meshes.model.sequence is not None
        assert ranks.sequence_rank == meshes.model.sequence.get_local_rank()
        found["slices"] = (ranks.data_rank, ranks.data_size, ranks.gradient_rank)
        errors = []
        for failing in ((1, 3), (0,)):
            with pytest.raises(UserError) as caught:
                control.together(lambda failing=failing: rank in failing and fail(f"I am {rank}"))
            errors.append(named(caught.value))
        with pytest.raises(UserError) as caught:
            control.together(lambda: fail("we all"))
        errors.append(named(caught.value))
        with pytest.raises(UserError) as caught:
            control.on_main(lambda: fail(f"rank {rank} has no disk"))
        errors.append(named(caught.value))
        with pytest.raises(UserError) as caught:
            control.together(lambda: (rank == 3 and fail("I am early")) or control.on_main(int))
        errors.append(named(caught.value))
        control.barrier()  # all are at the same place again
        return found, errors

    results = run_world(4, work)
    for rank, (found, errors) in enumerate(results):
        assert found == {
            "max": [3, 0],
            "any": (True, False),
            "gather": [0, 1, 4, 9],
            "main": (0, "rank 0"),
            "data": (rank // 2, 2, rank == 0),
            "sum": 11.0,
            # One batch, whose sequences the pairs of neighbours share.
            "slices": (0, 1, rank // 2),
        }
        assert errors == [
            (["rank 1"], "I am 1"),
            (["rank 0"], "I am 0"),
            ([], "we all"),
            ([], "rank 0 has no disk"),
            (["rank 3"], "I am early"),
        ]
