"""Warm up, stay, decay: a trapezoid."""

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

DECAY_SHAPES = ("linear", "sqrt", "cosine")


@dataclass
class WSDConfig(LRSchedulerConfig):
    """Settings of ``--lr-scheduler wsd``."""

    min_lr: float = option(0.0, "rate at the end of the decay")
    warmup_updates: int = option(0, "updates of linear warm-up to --lr")
    warmup_init_lr: float = option(0.0, "rate at the start of the warm-up")
    decay_updates: int = option(
        -1, "updates of the decay, which ends at --max-update; -1 takes a fifth of --max-update"
    )
    decay_shape: str = option("linear", "how the rate falls", choices=DECAY_SHAPES)

    def validate(self) -> None:
        super().validate()
        self.check_rate("--min-lr", self.min_lr)
        self.check_count("--warmup-updates", self.warmup_updates)
        self.check_rate("--warmup-init-lr", self.warmup_init_lr)
        if self.decay_updates != -1:
            self.check_count("--decay-updates", self.decay_updates)


@register_lr_scheduler("wsd", WSDConfig)
class WSDSchedule(BaseLRScheduler):
    """Warm-up, a plateau at ``--lr``, and a decay over the last updates.

    Source: Zhai et al. 2022, arXiv:2106.04560; Haegele et al. 2024, arXiv:2405.18392, whose
    1 - sqrt decay is the shape ``sqrt``. Since the plateau knows no end, a run can be prolonged by
    resuming from a checkpoint of before the decay.
    """

    cfg: WSDConfig

    def setup(self) -> None:
        cfg = self.cfg
        total = self.need_max_update()
        self.decay = total // 5 if cfg.decay_updates == -1 else cfg.decay_updates
        self.decay_start = total - self.decay
        if cfg.warmup_updates > self.decay_start:
            raise ConfigError(
                f"--warmup-updates {cfg.warmup_updates} and a decay of {self.decay} updates "
                f"together exceed --max-update {total}; lower --warmup-updates or --decay-updates"
            )

    def lr_at(self, num_updates: int) -> float:
        cfg = self.cfg
        if num_updates < cfg.warmup_updates:
            return warmup(num_updates, cfg.warmup_updates, cfg.warmup_init_lr, cfg.lr)
        if num_updates < self.decay_start or self.decay == 0:
            return cfg.lr
        x = min((num_updates - self.decay_start) / self.decay, 1.0)
        if cfg.decay_shape == "linear":
            left = 1 - x
        elif cfg.decay_shape == "sqrt":
            left = 1 - math.sqrt(x)
        else:
            left = 0.5 * (1 + math.cos(math.pi * x))
        return cfg.min_lr + (cfg.lr - cfg.min_lr) * left
