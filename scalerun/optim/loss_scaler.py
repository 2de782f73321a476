"""Dynamic loss scale: keeps half-precision gradients inside their range."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from scalerun.dataclass.configs import CommonConfig

FLOOR_PATIENCE = 10
"""Overflows in a row at the smallest scale after which training is beyond repair."""


class DynamicLossScaler:
    """Grows the scale while gradients are finite and shrinks it when they overflow.

    After ``window`` finite updates without a break the scale doubles, and so does the window, so a
    clean start grows at updates 256, 512, 1024, 2048 ... An overflow halves both, provided the
    share of overflows since the last change exceeds the tolerance; its update is skipped by the
    caller.

    Args:
        cfg: first scale, first window, tolerance (a share from 0 to 1), and the scale's floor.
        grow_window: False leaves the window as it is.
    """

    factor = 2.0

    def __init__(self, cfg: CommonConfig, *, grow_window: bool = True) -> None:
        self.min_scale = cfg.min_loss_scale
        self.scale_value = float(max(cfg.fp16_init_scale, self.min_scale))
        self.window = cfg.fp16_scale_window
        self.tolerance = cfg.fp16_scale_tolerance
        self.grow_window = grow_window
        self.iteration = 0
        self.last_overflow = -1
        self.last_rescale = -1
        self.overflows_since_rescale = 0
        self.overflows_at_floor = 0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward`` on; divide the gradients by ``scale_value`` afterwards."""
        return loss * self.scale_value

    def update(self, finite: bool) -> None:
        """Take note of one update.

        Args:
            finite: whether the gradient norm was finite; if not, the caller skips the step.

        Raises:
            FloatingPointError: the scale is at its floor and gradients keep overflowing.
        """
        if finite:
            self._grow_if_due()
            self.overflows_at_floor = 0
        else:
            self._overflow()
        self.iteration += 1

    def _grow_if_due(self) -> None:
        if (self.iteration - self.last_overflow) % self.window == 0:
            self.scale_value *= self.factor
            if self.grow_window:
                self.window = int(self.window * self.factor)
            self.last_rescale = self.iteration

    def _overflow(self) -> None:
        self.last_overflow = self.iteration
        self.overflows_since_rescale += 1
        if self.scale_value <= self.min_scale:
            self.overflows_at_floor += 1
            if self.overflows_at_floor >= FLOOR_PATIENCE:
                raise FloatingPointError(
                    f"gradients overflowed {self.overflows_at_floor} times in a row at the "
                    f"smallest loss scale, --min-loss-scale {self.min_scale:g}; lower --lr or "
                    "train with --bf16"
                )
        share = self.overflows_since_rescale / max(self.iteration - self.last_rescale, 1)
        if share > self.tolerance:
            self.scale_value = max(self.scale_value / self.factor, self.min_scale)
            if self.grow_window:
                self.window = max(int(self.window / self.factor), 1)
            self.last_rescale = self.iteration
            self.overflows_since_rescale = 0

    def state_dict(self) -> dict[str, Any]:
        """Scale, window and counters, as JSON values."""
        return {
            "scale_value": self.scale_value,
            "window": self.window,
            "iteration": self.iteration,
            "last_overflow": self.last_overflow,
            "last_rescale": self.last_rescale,
            "overflows_since_rescale": self.overflows_since_rescale,
            "overflows_at_floor": self.overflows_at_floor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        for name in self.state_dict():
            setattr(self, name, state[name])
