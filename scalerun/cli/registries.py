"""Which registry fills which slot of a run's configuration."""

from __future__ import annotations

from collections.abc import Mapping

import scalerun.criterions
import scalerun.models
import scalerun.optim
import scalerun.optim.lr_scheduler
import scalerun.tasks
from scalerun.dataclass.parser import Chooser

CHOOSERS: Mapping[str, Chooser] = {
    "task": scalerun.tasks.TASK_REGISTRY,
    "model": scalerun.models.ARCH_REGISTRY,
    "criterion": scalerun.criterions.CRITERION_REGISTRY,
    "optimizer": scalerun.optim.OPTIMIZER_REGISTRY,
    "lr_scheduler": scalerun.optim.lr_scheduler.LR_SCHEDULER_REGISTRY,
}
