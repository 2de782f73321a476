"""Half a cosine from the peak to the floor, with optional restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.optim.lr_scheduler.base_lr_scheduler import (
    BaseLRScheduler,
    LRSchedulerConfig,
    register_lr_scheduler,
    warmup,
)


@dataclass
class CosineConfig(LRSchedulerConfig):
    """Settings of ``--lr-scheduler cosine``."""

    min_lr: float = option(0.0, "floor of the learning rate")
    warmup_updates: int = option(0, "updates of linear warm-up to --lr")
    warmup_init_lr: float = option(-1.0, "rate at the start of the warm-up; -1 takes --min-lr")
    lr_period_updates: int = option(
        -1, "updates of the first period; -1 for a single one that ends at --max-update"
    )
    t_mult: float = option(1.0, "factor from one period's length to the next")
    lr_shrink: float = option(0.1, "factor from one period's peak to the next")

    def validate(self) -> None:
        super().validate()
        self.check_rate("--min-lr", self.min_lr)
        self.check_count("--warmup-updates", self.warmup_updates)
        if self.warmup_init_lr != -1:
            self.check_rate("--warmup-init-lr", self.warmup_init_lr)
        if self.lr_period_updates != -1 and self.lr_period_updates < 1:
            raise ConfigError(
                f"--lr-period-updates is {self.lr_period_updates}; give a number of updates from 1"
            )
        if not (math.isfinite(self.t_mult) and self.t_mult >= 1):
            raise ConfigError(f"--t-mult is {self.t_mult:g}; give a factor from 1")
        if not 0 < self.lr_shrink <= 1:
            raise ConfigError(f"--lr-shrink is {self.lr_shrink:g}; give a factor above 0, up to 1")


@register_lr_scheduler("cosine", CosineConfig)
class CosineSchedule(BaseLRScheduler):
    """Cosine annealing (Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5).

    In period i, c updates into its T: ``m + (L s**i - m) (1 + cos(pi c / T)) / 2`` with peak L,
    floor m, shrink s. The floor does not shrink, and a peak never falls below it. Without
    ``--lr-period-updates`` there is one period, after which the rate stays at the floor.
    """

    cfg: CosineConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.start = cfg.min_lr if cfg.warmup_init_lr == -1 else cfg.warmup_init_lr
        self.restarts = cfg.lr_period_updates != -1
        if self.restarts:
            self.period = cfg.lr_period_updates
            return
        self.period = self.need_max_update("--lr-period-updates") - cfg.warmup_updates
        if self.period <= 0:
            raise ConfigError(
                f"--warmup-updates {cfg.warmup_updates} leaves nothing of --max-update "
                f"{self.max_update} for the cosine; lower --warmup-updates"
            )

    def lr_at(self, num_updates: int) -> float:
        cfg = self.cfg
        if num_updates < cfg.warmup_updates:
            return warmup(num_updates, cfg.warmup_updates, self.start, cfg.lr)
        index, elapsed, length = self.locate(num_updates - cfg.warmup_updates)
        if elapsed >= length:
            return cfg.min_lr
        peak = max(cfg.lr * cfg.lr_shrink**index, cfg.min_lr)
        return cfg.min_lr + 0.5 * (peak - cfg.min_lr) * (1 + math.cos(math.pi * elapsed / length))

    def locate(self, t: int) -> tuple[int, float, float]:
        """(index of the period, updates into it, its length) of an update after the warm-up."""
        if not self.restarts:
            return 0, t, self.period
        if self.cfg.t_mult == 1:
            return t // self.period, t % self.period, self.period
        index, elapsed, length = 0, float(t), float(self.period)
        while elapsed >= length:
            elapsed -= length
            length *= self.cfg.t_mult
            index += 1
        return index, elapsed, length
