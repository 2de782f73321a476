"""Refusals of numbers that are out of range."""

from __future__ import annotations

from scalerun.dataclass.errors import ConfigError

MAX_WORKERS = 512


def at_least(flag: str, value: float | None, low: float) -> None:
    """Refuse a number below ``low``; None passes."""
    if value is not None and value < low:
        raise ConfigError(f"{flag} is {value:g}; give {low:g} or more")


def check_num_workers(value: int) -> None:
    """Refuse a number of worker processes that no machine has a use for."""
    if not 0 <= value <= MAX_WORKERS:
        raise ConfigError(f"--num-workers is {value}; give 0 to {MAX_WORKERS}")


def above_zero(flag: str, value: float | None) -> None:
    """Refuse a number that is not above 0; None passes."""
    if value is not None and value <= 0:
        raise ConfigError(f"{flag} is {value:g}; give a number above 0")
