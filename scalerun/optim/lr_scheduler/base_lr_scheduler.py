"""BaseLRScheduler: the learning rate as a function of the number of finished updates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.optim.base_optimizer import BaseOptimizer
from scalerun.registry import Registry


@dataclass
class LRSchedulerConfig(ScalerunDataclass):
    """What every schedule can be told."""

    lr: float = option(3e-4, "largest learning rate", aliases=("--learning-rate",))

    def validate(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"--lr is {self.lr:g}; give a learning rate above 0")

    def check_count(self, flag: str, value: int) -> None:
        """Refuse a negative number of updates."""
        if value < 0:
            raise ConfigError(f"{flag} is {value}; give a number of updates from 0")

    def check_rate(self, flag: str, value: float) -> None:
        """Refuse a rate that is negative, not finite, or above ``--lr``."""
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{flag} is {value:g}; give a learning rate from 0")
        if value > self.lr:
            raise ConfigError(f"{flag} {value:g} is above --lr {self.lr:g}; lower {flag}")


class BaseLRScheduler(ABC):
    """Sets the optimizer's learning rate.

    The rate is a pure function of the number of finished updates, so a resumed run needs nothing
    but that number.

    Args:
        cfg: the schedule's settings.
        optimizer: whose rate is set.
        max_update: updates of the whole run, 0 when it has no such limit.

    Raises:
        ConfigError: the settings do not fit ``max_update``, or need it and it is 0.
    """

    def __init__(
        self, cfg: LRSchedulerConfig, optimizer: BaseOptimizer, *, max_update: int
    ) -> None:
        self.cfg = cfg
        self.optimizer = optimizer
        self.max_update = max_update
        self.setup()
        self.step_update(0)

    def setup(self) -> None:  # noqa: B027
        """Derive numbers from the settings and check them against ``max_update``."""

    @abstractmethod
    def lr_at(self, num_updates: int) -> float:
        """The rate of the update that follows ``num_updates`` finished ones."""

    def step_update(self, num_updates: int) -> float:
        """Set the rate of the next update and return it."""
        lr = self.lr_at(num_updates)
        self.optimizer.set_lr(lr)
        return lr

    def step_begin_epoch(self, epoch: int) -> None:  # noqa: B027
        """Called before the first update of an epoch (from 1)."""

    def step_validation(self, metric: float) -> None:  # noqa: B027
        """Called after a validation with the value of the checkpoint metric."""

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; empty for a pure function of the number of updates."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            UserError: the state belongs to another kind of schedule.
        """
        if state:
            raise UserError(
                f"the saved schedule has a state ({', '.join(sorted(state))}) that the chosen one "
                "does not know; choose the same --lr-scheduler, or start a new run from it: "
                "--save-dir NEW --restore-file OLD --reset-lr-scheduler"
            )

    def need_max_update(self, instead: str | None = None) -> int:
        """``max_update``, which this schedule needs.

        Raises:
            ConfigError: it is 0.
        """
        if self.max_update <= 0:
            others = f" or {instead}" if instead else ""
            raise ConfigError(
                f"--lr-scheduler {self.cfg._name or type(self).__name__} needs to know its length: "
                f"give --max-update{others}"
            )
        return self.max_update


def warmup(t: int, num_updates: int, start: float, peak: float) -> float:
    """The straight line from ``start`` at t = 0 to ``peak`` at t = ``num_updates``."""
    return start + t * (peak - start) / num_updates


LR_SCHEDULER_REGISTRY: Registry[BaseLRScheduler] = Registry(
    "--lr-scheduler",
    BaseLRScheduler,  # type: ignore[type-abstract]
)
register_lr_scheduler = LR_SCHEDULER_REGISTRY.register


def build_lr_scheduler(
    cfg: ScalerunDataclass, optimizer: BaseOptimizer, *, max_update: int
) -> BaseLRScheduler:
    """Build the schedule that ``cfg`` describes."""
    cls = LR_SCHEDULER_REGISTRY.class_for(cfg)
    return cls(cfg, optimizer, max_update=max_update)  # type: ignore[arg-type]
