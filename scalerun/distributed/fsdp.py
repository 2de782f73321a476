"""Shards a model over ranks with torch's ``fully_shard`` (FSDP2).

Gradients are summed over the ranks, never averaged: the loss is already divided by the number of
target tokens of the whole update. That is also the only rule that is right for experts, whose
tokens come from other ranks than those that share their gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from scalerun.dataclass.configs import DistributedConfig
from scalerun.distributed.gradient_sum import GradientSum
from scalerun.distributed.mesh import Meshes
from scalerun.distributed.tree_sum import TreeReduceScatter


def shard_model(
    model: nn.Module,
    meshes: Meshes,
    cfg: DistributedConfig,
    *,
    units: Sequence[nn.Module],
    experts: Sequence[nn.Module] = (),
    dtype: torch.dtype = torch.float32,
) -> None:
    """Shard in place a model that is shapes alone; its parameters become DTensors.

    Source: Zhao et al. 2023, arXiv:2304.11277; Rajbhandari et al. 2020, arXiv:1910.02054.

    Args:
        meshes: parameters are spread over ``dp_shard``, and copied over ``dp_replicate``.
        units: modules that are gathered, computed and freed as one; what is in none of them, such
            as a tied embedding, belongs to the whole model.
        experts: modules inside the units whose parameters are other ones on each rank of ``ep``;
            they are spread over ``efsdp``.
        dtype: that products are computed in; parameters are gathered in it where the flags say so.
    """
    dense = _data_axes(meshes.dense)
    offload = (
        CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        if cfg.cpu_offload
        else OffloadPolicy()
    )
    gathered = (
        # The residual stream keeps its type: only weights are cast.
        MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        if cfg.gather_in_half
        else MixedPrecisionPolicy()
    )
    reshard = not cfg.no_reshard_after_forward
    parts = [(module, meshes.sparse["efsdp"]) for module in experts]
    parts += [(unit, dense) for unit in units]
    for module, mesh in parts:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=gathered,
            offload_policy=offload,
        )
    # Backward begins with what forward ended with: to free it in between would be in vain. The
    # embedding starts the residual stream, so it keeps its type.
    fully_shard(model, mesh=dense, reshard_after_forward=False, offload_policy=offload)
    for sharded in _sharded(model):
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
        if cfg.deterministic_reduce:
            sharded.set_custom_reduce_scatter(cast(ReduceScatter, TreeReduceScatter()))


class ShardedSum(GradientSum):
    """The model's own units reduce their gradients, those of all batches of an update at once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @contextlib.contextmanager
    def batch(self, *, last: bool) -> Iterator[None]:
        for module in _sharded(self.model):
            module.set_requires_gradient_sync(last, recurse=False)
        yield

    def finish(self) -> None:
        pass


def _data_axes(dense: DeviceMesh) -> DeviceMesh:
    """(dp_shard) or, with copies, (dp_replicate, dp_shard)."""
    if dense["dp_replicate"].size() > 1:
        return dense["dp_replicate", "dp_shard"]
    return dense["dp_shard"]


def _sharded(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
