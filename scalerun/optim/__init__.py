"""Optimizers, learning-rate schedules, clipping, loss scaling and weight averaging."""

from scalerun.optim import adam, sgd
from scalerun.optim.base_optimizer import (
    OPTIMIZER_REGISTRY,
    BaseOptimizer,
    OptimizerConfig,
    build_optimizer,
    register_optimizer,
)

__all__ = [
    "OPTIMIZER_REGISTRY",
    "BaseOptimizer",
    "OptimizerConfig",
    "adam",
    "build_optimizer",
    "register_optimizer",
    "sgd",
]
