"""Learning-rate schedules."""

from scalerun.optim.lr_scheduler import constant, cosine, inverse_sqrt, polynomial_decay, wsd
from scalerun.optim.lr_scheduler.base_lr_scheduler import (
    LR_SCHEDULER_REGISTRY,
    BaseLRScheduler,
    LRSchedulerConfig,
    build_lr_scheduler,
    register_lr_scheduler,
)

__all__ = [
    "LR_SCHEDULER_REGISTRY",
    "BaseLRScheduler",
    "LRSchedulerConfig",
    "build_lr_scheduler",
    "constant",
    "cosine",
    "inverse_sqrt",
    "polynomial_decay",
    "register_lr_scheduler",
    "wsd",
]
