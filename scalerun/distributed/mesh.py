"""How many ranks each kind of parallelism has, and the meshes they form.

A rank is a process with one device. Neighbouring ranks are closest: the tensor axis varies fastest,
so that it stays inside a host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from scalerun.dataclass.configs import DistributedConfig
from scalerun.dataclass.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


@dataclass(frozen=True)
class ParallelDims:
    """The degrees of parallelism; their product is the number of ranks.

    ``replicate * shard`` ranks hold other parts of the same parameters, or copies of them, and see
    other tokens. The expert axis is another cut of the same ranks: it divides that number.
    """

    replicate: int = 1
    """Copies of the model."""
    shard: int = 1
    """Ranks that one copy is sharded over (FSDP)."""
    tensor: int = 1
    """Ranks that share each matrix product (Megatron)."""
    expert: int = 1
    """Ranks that the experts of a layer are spread over."""
    sequence: int = 1
    """Ranks that share each sequence; a divisor of ``replicate * shard``."""

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.replicate * self.shard * self.tensor

    @property
    def gradient_size(self) -> int:
        """Ranks whose gradients add up: those that see other tokens."""
        return self.replicate * self.shard

    @property
    def data_size(self) -> int:
        """Ranks, or groups of them, that read other batches."""
        return self.gradient_size // self.sequence

    def describe(self) -> str:
        """The degrees above 1, for people."""
        degrees = {
            "copies": self.replicate,
            "shards": self.shard,
            "tensor": self.tensor,
            "expert": self.expert,
            "sequence": self.sequence,
        }
        words = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        return f"{self.world_size} ranks ({', '.join(words)})"


@dataclass(frozen=True)
class ModelMeshes:
    """The axes that layers compute over, each a mesh of one dimension; None for a single rank."""

    tensor: DeviceMesh | None = None
    """Ranks that share each matrix product."""
    expert: DeviceMesh | None = None
    """Ranks that the experts of a layer are spread over."""
    expert_weights: DeviceMesh | None = None
    """Both axes, (expert, tensor), for what is cut by both; None without a tensor axis."""
    sequence: DeviceMesh | None = None
    """Ranks that share each sequence (LongNet)."""
    sequence_parallel: bool = False
    """Between matrix products the tokens are spread over the tensor axis."""


ONE_RANK = ModelMeshes()
"""Every layer is whole."""


@dataclass(frozen=True)
class Meshes:
    """The ranks as meshes. The two roots cut the same ranks in two ways."""

    dense: DeviceMesh
    """(dp_replicate, dp_shard, tp)"""
    sparse: DeviceMesh
    """(efsdp, ep, tp): ``ep`` holds other experts, ``efsdp`` parts or copies of the same ones."""
    gradient: DeviceMesh
    """One axis: the ranks that see other tokens."""
    model: ModelMeshes


def parallel_dims(cfg: DistributedConfig, world_size: int) -> ParallelDims:
    """The degrees that the flags ask for.

    Raises:
        ConfigError: they do not fit the number of ranks.
    """
    tensor, expert, sequence = (
        cfg.model_parallel_size,
        cfg.expert_parallel_size,
        cfg.seq_parallel_size,
    )
    _divides("--model-parallel-size", tensor, f"the {world_size} ranks", world_size)
    data = world_size // tensor
    of = f"the {data} data-parallel ranks ({world_size} ranks / --model-parallel-size {tensor})"
    _divides("--expert-parallel-size", expert, of, data)
    _divides("--seq-parallel-size", sequence, of, data)
    replicate = cfg.replicate_size
    match cfg.ddp_backend:
        case "fully_sharded":
            _divides("--replicate-size", replicate, of, data)
        case "pytorch_ddp":
            replicate = data
        case "none":
            if data > 1:
                raise ConfigError(
                    f"--ddp-backend none leaves {of} without each other's gradients; give "
                    "fully_sharded or pytorch_ddp"
                )
    if cfg.deterministic_reduce:
        _check_deterministic(cfg, data)
    return ParallelDims(replicate, data // replicate, tensor, expert, sequence)


def _check_deterministic(cfg: DistributedConfig, data: int) -> None:
    """Refuse layouts whose sums have an order of their own."""
    if data & (data - 1):
        raise ConfigError(
            "--deterministic-reduce needs 1, 2, 4, 8 ... data-parallel ranks, and there are "
            f"{data}; start so many, or remove the flag"
        )
    for flag, value, most in (
        ("--expert-parallel-size", cfg.expert_parallel_size, 1),
        ("--seq-parallel-size", cfg.seq_parallel_size, 1),
        ("--replicate-size", cfg.replicate_size, 2),
    ):
        if value > most:
            raise ConfigError(
                f"--deterministic-reduce does not go with {flag} {value}, which adds in an order "
                f"of its own; give at most {most}"
            )


def build_meshes(
    dims: ParallelDims, device_type: str, *, sequence_parallel: bool = False
) -> Meshes:
    """The meshes of a running process group; every rank calls it."""
    from torch.distributed import init_device_mesh  # most of a second that one process need not pay

    dense = init_device_mesh(
        device_type,
        (dims.replicate, dims.shard, dims.tensor),
        mesh_dim_names=("dp_replicate", "dp_shard", "tp"),
    )
    sparse = init_device_mesh(
        device_type,
        (dims.gradient_size // dims.expert, dims.expert, dims.tensor),
        mesh_dim_names=("efsdp", "ep", "tp"),
    )
    gradient = init_device_mesh(
        device_type, (dims.gradient_size, dims.tensor), mesh_dim_names=("dp", "tp")
    )["dp"]
    sequence = None
    if dims.sequence > 1:
        shape = (dims.data_size, dims.sequence, dims.tensor)
        sequence = init_device_mesh(device_type, shape, mesh_dim_names=("dp", "cp", "tp"))["cp"]
    model = ModelMeshes(
        tensor=dense["tp"] if dims.tensor > 1 else None,
        expert=sparse["ep"] if dims.expert > 1 else None,
        expert_weights=sparse["ep", "tp"] if dims.tensor > 1 else None,
        sequence=sequence,
        sequence_parallel=sequence_parallel and dims.tensor > 1,
    )
    return Meshes(dense, sparse, gradient, model)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or the plain tensor itself.

    DTensors are told by what they have: importing their class takes most of a second.
    """
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _divides(flag: str, value: int, of: str, whole: int) -> None:
    if whole % value:
        more = "start more: --distributed-world-size, torchrun or srun"
        raise ConfigError(
            f"{flag} {value} does not divide {of}; {more if value > whole else 'choose a divisor'}"
        )
