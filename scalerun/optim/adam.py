"""Adam with decoupled weight decay (AdamW)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.optim.apex_adam import build_apex_adamw, steps_from_state, steps_to_state
from scalerun.optim.base_optimizer import BaseOptimizer, OptimizerConfig, register_optimizer


@dataclass
class AdamConfig(OptimizerConfig):
    """Settings of ``--optimizer adam``."""

    adam_betas: list[float] = option(
        [0.9, 0.999], "decay per update of the running means of the gradient and of its square"
    )
    adam_eps: float = option(1e-8, "added to the root of the mean square")
    adam_implementation: str = option(
        "torch", "torch's fused kernel, or that of NVIDIA's apex", choices=("torch", "apex")
    )

    def validate(self) -> None:
        super().validate()
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ConfigError(
                f"--adam-betas is {self.adam_betas}; give two numbers from 0 to below 1, as in "
                "0.9,0.98"
            )
        if not (math.isfinite(self.adam_eps) and self.adam_eps > 0):
            raise ConfigError(f"--adam-eps is {self.adam_eps:g}; give a number above 0")


@register_optimizer("adam", AdamConfig)
class Adam(BaseOptimizer):
    """AdamW: the decay is taken from the weights, not added to the gradient.

    Source: Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019, arXiv:1711.05101. Per
    step t, with gradient g, rate lr and decay wd::

        m = b1 m + (1 - b1) g                 v = b2 v + (1 - b2) g**2
        p = p - lr wd p
        p = p - lr m / (1 - b1**t) / (sqrt(v / (1 - b2**t)) + eps)

    Running means are kept in the parameter's type, one step count per parameter. torch's fused
    kernel also serves the CPU, where it is several times faster than the default loop.
    """

    cfg: AdamConfig

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        beta1, beta2 = self.cfg.adam_betas
        if self.cfg.adam_implementation == "apex":
            if self.same_bits:
                raise ConfigError(
                    "--adam-implementation apex and --deterministic-reduce exclude each other: its "
                    "rounding depends on how tensors are cut; leave one out"
                )
            return build_apex_adamw(groups, betas=(beta1, beta2), eps=self.cfg.adam_eps)
        return torch.optim.AdamW(
            groups,
            lr=0.0,
            betas=(beta1, beta2),
            eps=self.cfg.adam_eps,
            fused=not self.same_bits,
            foreach=self.same_bits,
        )

    def blank_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=param.device),
            "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
        }

    def state_dict(self) -> dict[str, Tensor]:
        state = super().state_dict()
        if self.cfg.adam_implementation == "apex":
            steps_to_state(self.optimizer)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        if self.cfg.adam_implementation == "apex":
            steps_from_state(self.optimizer)
