"""Stochastic gradient descent with momentum and decoupled weight decay (SGDW)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.distributed.mesh import local_part
from scalerun.optim.base_optimizer import BaseOptimizer, OptimizerConfig, register_optimizer


@dataclass
class SGDConfig(OptimizerConfig):
    """Settings of ``--optimizer sgd``."""

    momentum: float = option(0.0, "share of the previous step that is kept")
    nesterov: bool = option(False, "look ahead along the momentum (Nesterov)")

    def validate(self) -> None:
        super().validate()
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"--momentum is {self.momentum:g}; give a number from 0 to below 1")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("--nesterov needs a --momentum above 0")


@register_optimizer("sgd", SGDConfig)
class SGD(BaseOptimizer):
    """SGDW: momentum on the gradient alone, decay straight from the weights.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 1. With momentum mu::

        b = mu b + g                          (the first b is a copy of g)
        p = p - lr wd p
        p = p - lr (g + mu b  if nesterov else  b)
    """

    cfg: SGDConfig

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        # torch's SGD adds weight_decay to the gradient; ours is applied in step().
        torch_groups = [
            {**group, "weight_decay": 0.0, "decoupled_decay": group["weight_decay"]}
            for group in groups
        ]
        # torch has no fused kernel of SGD for DTensors.
        sharded = any(hasattr(param, "to_local") for param in self.named_params.values())
        optimizer = torch.optim.SGD(
            torch_groups,
            lr=0.0,
            momentum=self.cfg.momentum,
            nesterov=self.cfg.nesterov,
            fused=not sharded,
            foreach=sharded,
        )
        # The fused kernel wants either every buffer or none; a zero buffer gives mu 0 + g = g.
        for param in self.named_params.values():
            optimizer.state[param].update(self.blank_state(param))
        return optimizer

    def blank_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        if self.cfg.momentum == 0:
            return {}
        return {"momentum_buffer": torch.zeros_like(param, memory_format=torch.preserve_format)}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            factor = 1.0 - group["lr"] * group["decoupled_decay"]
            decayed = [local_part(p) for p in group["params"] if p.grad is not None]
            if factor != 1.0 and decayed:
                torch._foreach_mul_(decayed, factor)
        super().step()
