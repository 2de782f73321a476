import pytest
import torch
import torch.distributed as dist

from cpu_tests.world import run_world
from scalerun.dataclass.configs import DistributedConfig
from scalerun.dataclass.errors import ConfigError
from scalerun.distributed.mesh import ParallelDims, build_meshes, parallel_dims
from scalerun.distributed.sharding import empty_parameter, fill


def dims(world_size, **changes):
    cfg = DistributedConfig(**changes)
    cfg.validate()
    return parallel_dims(cfg, world_size)


def test_what_is_no_other_axis_shards():
    assert dims(8) == ParallelDims(shard=8)
    assert dims(8, model_parallel_size=2) == ParallelDims(shard=4, tensor=2)
    assert dims(8, replicate_size=2) == ParallelDims(replicate=2, shard=4)
    assert dims(8, ddp_backend="pytorch_ddp") == ParallelDims(replicate=8)
    assert dims(2, ddp_backend="none", model_parallel_size=2) == ParallelDims(tensor=2)
    assert dims(8, seq_parallel_size=4).data_size == 2


@pytest.mark.parametrize(
    ("world_size", "changes", "message"),
    [
        (4, {"model_parallel_size": 3}, "--model-parallel-size 3 does not divide the 4 ranks"),
        (4, {"expert_parallel_size": 3}, "--expert-parallel-size 3 does not divide"),
        (4, {"model_parallel_size": 2, "expert_parallel_size": 4}, "the 2 data-parallel ranks"),
        (4, {"replicate_size": 3}, "--replicate-size 3 does not divide"),
        (4, {"seq_parallel_size": 3}, "--seq-parallel-size 3 does not divide"),
        (2, {"ddp_backend": "none"}, "--ddp-backend none leaves"),
        (2, {"ddp_backend": "pytorch_ddp", "cpu_offload": True}, "--cpu-offload has no effect"),
        (2, {"sequence_parallel": True}, "--sequence-parallel has no effect"),
        (2, {"model_parallel_size": 0}, "--model-parallel-size is 0"),
        (3, {"deterministic_reduce": True}, "there are 3; start so many, or remove the flag"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(world_size, changes, message):
    with pytest.raises(ConfigError, match=message):
        dims(world_size, **changes)


def test_neighbours_share_a_tensor_axis_and_experts_cut_the_data_ranks():
    def work(rank):
        meshes = build_meshes(ParallelDims(shard=2, tensor=2, expert=2), "cpu")
        return [
            dist.get_process_group_ranks(mesh.get_group())
            for mesh in (meshes.model.tensor, meshes.model.expert, meshes.dense["dp_shard"])
        ]

    tensor, expert, shard = zip(*run_world(4, work), strict=True)
    assert tensor == ([0, 1], [0, 1], [2, 3], [2, 3])
    assert expert == shard == ([0, 2], [1, 3], [0, 2], [1, 3])


def test_a_sharded_parameter_is_filled_with_this_ranks_part():
    whole = torch.arange(24.0).view(4, 6)

    def work(rank):
        mesh = build_meshes(ParallelDims(tensor=2), "cpu").model.tensor
        parts = []
        for dim in (0, 1):
            with torch.device("meta"):
                parameter = empty_parameter((4, 6), mesh=mesh, dim=dim)
            module = torch.nn.Module()
            module.weight = parameter
            module.to_empty(device="cpu")
            fill(module.weight, whole)
            assert module.weight.shape == (4, 6)
            parts.append(module.weight.to_local())
        with pytest.raises(ValueError, match="cannot share dimension 1"):
            empty_parameter((4, 5), mesh=mesh, dim=1)
        return [part.detach().tolist() for part in parts]

    for rank, (rows, columns) in enumerate(run_world(2, work)):
        assert rows == whole.chunk(2, 0)[rank].tolist()
        assert columns == whole.chunk(2, 1)[rank].tolist()
