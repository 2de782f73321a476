"""Decay along a polynomial from the peak to an end value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.optim.lr_scheduler.base_lr_scheduler import (
    BaseLRScheduler,
    LRSchedulerConfig,
    register_lr_scheduler,
)


@dataclass
class PolynomialDecayConfig(LRSchedulerConfig):
    """Settings of ``--lr-scheduler polynomial_decay``."""

    warmup_updates: int = option(0, "updates of linear warm-up from 0 to --lr")
    zero_lr_warmup_steps: int = option(0, "updates at rate 0 before the warm-up")
    end_learning_rate: float = option(0.0, "rate at the end of the decay")
    total_num_update: int = option(-1, "update at which the decay ends; -1 takes --max-update")
    power: float = option(1.0, "exponent of the decay; 1 is a straight line")

    def validate(self) -> None:
        super().validate()
        self.check_count("--warmup-updates", self.warmup_updates)
        self.check_count("--zero-lr-warmup-steps", self.zero_lr_warmup_steps)
        self.check_rate("--end-learning-rate", self.end_learning_rate)
        if self.total_num_update != -1 and self.total_num_update < 1:
            raise ConfigError(
                f"--total-num-update is {self.total_num_update}; give a number of updates from 1"
            )
        if not (math.isfinite(self.power) and self.power > 0):
            raise ConfigError(f"--power is {self.power:g}; give a number above 0")


@register_lr_scheduler("polynomial_decay", PolynomialDecayConfig)
class PolynomialDecaySchedule(BaseLRScheduler):
    """Zero phase of Z updates, warm-up of W, then ``E + (L - E) (1 - x)**power``.

    x runs from 0 at Z + W to 1 at ``--total-num-update``; L is the peak, E the end value.
    """

    cfg: PolynomialDecayConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.total = cfg.total_num_update
        flag = "--total-num-update"
        if self.total == -1:
            self.total, flag = self.need_max_update("--total-num-update"), "--max-update"
        self.decay_start = cfg.zero_lr_warmup_steps + cfg.warmup_updates
        if self.decay_start > self.total:
            raise ConfigError(
                f"--zero-lr-warmup-steps {cfg.zero_lr_warmup_steps} and --warmup-updates "
                f"{cfg.warmup_updates} together exceed {flag} {self.total}; lower them"
            )

    def lr_at(self, num_updates: int) -> float:
        cfg, t = self.cfg, num_updates
        if cfg.zero_lr_warmup_steps > 0 and t <= cfg.zero_lr_warmup_steps:
            return 0.0
        if cfg.warmup_updates > 0 and t <= self.decay_start:
            return cfg.lr * (t - cfg.zero_lr_warmup_steps) / cfg.warmup_updates
        if t >= self.total:
            return cfg.end_learning_rate
        left = 1 - (t - self.decay_start) / (self.total - self.decay_start)
        return float(cfg.end_learning_rate + (cfg.lr - cfg.end_learning_rate) * left**cfg.power)
