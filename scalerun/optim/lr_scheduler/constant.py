"""The same rate throughout, after an optional warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from scalerun.dataclass.scalerun_dataclass import option
from scalerun.optim.lr_scheduler.base_lr_scheduler import (
    BaseLRScheduler,
    LRSchedulerConfig,
    register_lr_scheduler,
    warmup,
)


@dataclass
class ConstantConfig(LRSchedulerConfig):
    """Settings of ``--lr-scheduler constant``."""

    warmup_updates: int = option(0, "updates of linear warm-up to --lr")
    warmup_init_lr: float = option(0.0, "rate at the start of the warm-up")

    def validate(self) -> None:
        super().validate()
        self.check_count("--warmup-updates", self.warmup_updates)
        self.check_rate("--warmup-init-lr", self.warmup_init_lr)


@register_lr_scheduler("constant", ConstantConfig)
class ConstantSchedule(BaseLRScheduler):
    """A linear warm-up, then ``--lr``."""

    cfg: ConstantConfig

    def lr_at(self, num_updates: int) -> float:
        cfg = self.cfg
        if num_updates < cfg.warmup_updates:
            return warmup(num_updates, cfg.warmup_updates, cfg.warmup_init_lr, cfg.lr)
        return cfg.lr
