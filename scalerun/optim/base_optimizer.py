"""BaseOptimizer: one optimizer step over named parameters, with a state that knows no order."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.optim.clip import GradNorm, NormType, clip_grad_norm, multiply_grads
from scalerun.optim.param_groups import build_param_groups
from scalerun.registry import Registry


@dataclass
class OptimizerConfig(ScalerunDataclass):
    """What every optimizer can be told about its parameter groups."""

    weight_decay: float = option(
        0.0, "share of a weight removed per update and unit of learning rate", aliases=("--wd",)
    )
    weight_decay_all: bool = option(
        False, "also decay parameters of fewer than two dimensions: biases and norms"
    )
    weight_decay_exclude: list[str] = option(
        [], "name patterns of parameters that never decay, such as *embed*"
    )
    lr_scale: dict[str, float] = option(
        {}, "factors on the learning rate by name pattern, such as *embed*=0.1"
    )

    def validate(self) -> None:
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ConfigError(f"--weight-decay is {self.weight_decay:g}; give 0 or more")
        for pattern, factor in self.lr_scale.items():
            if not (math.isfinite(factor) and factor >= 0):
                raise ConfigError(f"--lr-scale gives {pattern!r} {factor:g}; give 0 or more")


class BaseOptimizer(ABC):
    """Steps named parameters.

    Its state is a flat dictionary ``<parameter name>.<kind>`` of tensors, so that a checkpoint
    depends neither on the order of parameters nor on how they are grouped. Settings such as
    learning rate and betas are no part of the state: those of the command are in force.

    Args:
        cfg: the optimizer's settings.
        named_params: canonical names and parameters; those without ``requires_grad`` are left out.
        same_bits: step each element by the same operations, wherever its tensor is cut. Fused
            kernels round the last elements of a tensor in another way.

    Raises:
        ConfigError: nothing is left to train, or a name pattern matches no parameter.
    """

    def __init__(
        self,
        cfg: OptimizerConfig,
        named_params: Iterable[tuple[str, nn.Parameter]],
        *,
        same_bits: bool = False,
    ) -> None:
        self.cfg = cfg
        self.same_bits = same_bits
        self.named_params = {name: p for name, p in named_params if p.requires_grad}
        if not self.named_params:
            raise ConfigError("the model has no parameter to train")
        groups = build_param_groups(
            self.named_params,
            weight_decay=cfg.weight_decay,
            decay_all=cfg.weight_decay_all,
            decay_exclude=cfg.weight_decay_exclude,
            lr_scale=cfg.lr_scale,
        )
        self.optimizer = self.make_optimizer(groups)
        self._lr = 0.0
        self.set_lr(0.0)

    @abstractmethod
    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Build torch's optimizer from groups made by :func:`build_param_groups`."""

    @abstractmethod
    def blank_state(self, param: nn.Parameter) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that are trained, in the model's order."""
        return list(self.named_params.values())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of torch's optimizer."""
        return self.optimizer.param_groups

    def get_lr(self) -> float:
        """The learning rate of groups whose ``lr_scale`` is 1."""
        return self._lr

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group, times the group's ``lr_scale``."""
        self._lr = lr
        for group in self.param_groups:
            group["lr"] = lr * group["lr_scale"]

    def step(self) -> None:
        """Update the parameters that have a gradient."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Free all gradients."""
        for param in self.named_params.values():
            param.grad = None

    def multiply_grads(self, factor: Tensor | float) -> None:
        """Multiply all gradients in place."""
        grads = [param.grad for param in self.named_params.values() if param.grad is not None]
        if grads:
            multiply_grads(grads, factor)

    def clip_grad_norm(self, max_norm: float, norm_type: NormType = "l2") -> GradNorm:
        """Clip all gradients together; see :func:`scalerun.optim.clip.clip_grad_norm`."""
        return clip_grad_norm(self.named_params, max_norm, norm_type)

    def state_dict(self) -> dict[str, Tensor]:
        """The live state tensors by name; parameters that never stepped get their blank state."""
        state = {}
        for name, param in self.named_params.items():
            own = self.optimizer.state[param]
            if not own:
                own.update(self.blank_state(param))
            state.update({f"{name}.{kind}": tensor for kind, tensor in own.items()})
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state into this optimizer's own tensors.

        Raises:
            UserError: names or shapes differ from this optimizer's state.
        """
        own = self.state_dict()
        if own.keys() != state.keys():
            first = min(own.keys() ^ state.keys())
            side = "lacks" if first in own else "has an unexpected"
            raise UserError(
                f"the saved optimizer state {side} {first}; use the same --optimizer, or start a "
                "new run from it: --save-dir NEW --restore-file OLD --reset-optimizer"
            )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise UserError(
                    f"the saved optimizer state {name} has shape {tuple(state[name].shape)} and not"
                    f" {tuple(tensor.shape)}; start a new run from it: "
                    "--save-dir NEW --restore-file OLD --reset-optimizer"
                )
            if tensor is not state[name]:
                tensor.copy_(state[name])


OPTIMIZER_REGISTRY: Registry[BaseOptimizer] = Registry(
    "--optimizer",
    BaseOptimizer,  # type: ignore[type-abstract]
)
register_optimizer = OPTIMIZER_REGISTRY.register


def build_optimizer(
    cfg: ScalerunDataclass,
    named_params: Iterable[tuple[str, nn.Parameter]],
    *,
    same_bits: bool = False,
) -> BaseOptimizer:
    """Build the optimizer that ``cfg`` describes; see :class:`BaseOptimizer`."""
    kind = OPTIMIZER_REGISTRY.class_for(cfg)
    return kind(cfg, named_params, same_bits=same_bits)  # type: ignore[arg-type]
