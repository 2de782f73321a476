"""From a model that is shapes alone to one that several ranks train."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from scalerun.dataclass.configs import DistributedConfig
from scalerun.dataclass.errors import ConfigError
from scalerun.distributed.gradient_sum import GradientSum, LocalSum, ReplicatedSum
from scalerun.distributed.ranks import Ranks
from scalerun.distributed.tree_sum import TreeSum, sum_replicated


def shards(ranks: Ranks, cfg: DistributedConfig) -> bool:
    """Whether parameters are spread over the data-parallel ranks."""
    return cfg.ddp_backend == "fully_sharded" and ranks.dims.gradient_size > 1


def parallelize(
    model: nn.Module,
    ranks: Ranks,
    cfg: DistributedConfig,
    *,
    units: list[nn.Module],
    experts: list[nn.Module],
    dtype: torch.dtype,
) -> None:
    """Shard a model before its weights are made; what has to be compiled is by now.

    Args:
        units: modules that are each gathered as one.
        experts: modules whose parameters are spread over the expert axis.
        dtype: that products are computed in.
    """
    if shards(ranks, cfg):
        from scalerun.distributed.fsdp import shard_model  # slow to import

        assert ranks.meshes is not None
        shard_model(model, ranks.meshes, cfg, units=units, experts=experts, dtype=dtype)


def gradient_sum(
    model: nn.Module, ranks: Ranks, cfg: DistributedConfig, *, experts: list[nn.Module]
) -> GradientSum:
    """How the gradients of a model that :func:`parallelize` has seen meet."""
    params = list(model.parameters())
    if ranks.dims.gradient_size == 1:
        return TreeSum(params, lambda: None) if cfg.deterministic_reduce else LocalSum()
    assert ranks.meshes is not None
    if shards(ranks, cfg):
        if cfg.deterministic_reduce:
            return TreeSum(params, lambda: None)
        from scalerun.distributed.fsdp import ShardedSum  # slow to import

        return ShardedSum(model)
    if cfg.deterministic_reduce:
        return TreeSum(params, sum_replicated(params, ranks.meshes.gradient.get_group()))
    apart = {id(param) for module in experts for param in module.parameters()}
    whole = [param for param in model.parameters() if id(param) not in apart]
    spread = [param for module in experts for param in module.parameters()]
    return ReplicatedSum(
        [
            (whole, ranks.meshes.gradient.get_group()),
            (spread, ranks.meshes.sparse["efsdp"].get_group()),
        ]
    )


def check_backend(
    cfg: DistributedConfig, device: torch.device, *, others: Mapping[str, bool]
) -> None:
    """Refuse a backend that cannot work here; to be called before anything is built.

    Args:
        others: flags that sharding a whole model by wrappers does not go with, and whether they
            are given.

    Raises:
        ConfigError: says why.
    """
    if cfg.ddp_backend == "fairscale":
        from scalerun.distributed.fairscale_fsdp import check_fairscale  # slow to import

        check_fairscale(device)
        for flag in (flag for flag, given in others.items() if given):
            raise ConfigError(
                f"{flag} does not go with --ddp-backend fairscale; give fully_sharded, or leave "
                "it out"
            )


def wrap_built(
    model: nn.Module,
    ranks: Ranks,
    cfg: DistributedConfig,
    *,
    units: list[nn.Module],
    device: torch.device,
) -> GradientSum | None:
    """Shard a model that has its weights, with a backend that cannot do it before.

    Returns:
        How its gradients meet; None where :func:`gradient_sum` says it.

    Raises:
        ConfigError: the ranks cannot share a parameter.
    """
    if cfg.ddp_backend != "fairscale" or ranks.dims.gradient_size == 1:
        return None
    from scalerun.distributed.fairscale_fsdp import wrap_model  # slow to import

    assert ranks.meshes is not None
    return wrap_model(
        model,
        ranks.meshes.dense["dp_shard"],
        units=units,
        reshard_after_forward=not cfg.no_reshard_after_forward,
        device=device,
    )
