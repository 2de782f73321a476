"""Decay with the inverse square root of the number of updates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scalerun.dataclass.scalerun_dataclass import option
from scalerun.optim.lr_scheduler.base_lr_scheduler import (
    BaseLRScheduler,
    LRSchedulerConfig,
    register_lr_scheduler,
    warmup,
)


@dataclass
class InverseSqrtConfig(LRSchedulerConfig):
    """Settings of ``--lr-scheduler inverse_sqrt``."""

    warmup_updates: int = option(4000, "updates of linear warm-up to --lr")
    warmup_init_lr: float = option(-1.0, "rate at the start of the warm-up; -1 takes 0")

    def validate(self) -> None:
        super().validate()
        self.check_count("--warmup-updates", self.warmup_updates)
        if self.warmup_init_lr != -1:
            self.check_rate("--warmup-init-lr", self.warmup_init_lr)


@register_lr_scheduler("inverse_sqrt", InverseSqrtConfig)
class InverseSqrtSchedule(BaseLRScheduler):
    """``lr * sqrt(warmup) / sqrt(t)`` after a linear warm-up.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 5.3, with a free peak. Without a
    warm-up, ``lr / sqrt(t)`` from the first update on.
    """

    cfg: InverseSqrtConfig

    def lr_at(self, num_updates: int) -> float:
        cfg = self.cfg
        if num_updates < cfg.warmup_updates:
            start = max(cfg.warmup_init_lr, 0.0)
            return warmup(num_updates, cfg.warmup_updates, start, cfg.lr)
        return cfg.lr * math.sqrt(max(cfg.warmup_updates, 1)) / math.sqrt(max(num_updates, 1))
