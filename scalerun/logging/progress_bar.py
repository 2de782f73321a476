"""The progress bar, and how long a run still takes."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from scalerun.logging.base_sink import BaseSink
from scalerun.logging.records import Record, update_of


def show_seconds(seconds: float) -> str:
    """``3:07``, ``2:03:07`` or ``4d 02:03:07``."""
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _size() -> dict[str, Any]:
    """Follow the terminal's size; where it reports none, tqdm would show nothing at all."""
    try:
        reported = os.get_terminal_size(sys.stderr.fileno())
        known = min(reported) > 0
    except (OSError, ValueError):
        known = False
    if known:
        return {"dynamic_ncols": True}
    columns, lines = shutil.get_terminal_size()
    return {"ncols": columns, "nrows": lines}


class TimeLeft(BaseSink):
    """Estimates the seconds until a run ends: whichever of its limits comes first.

    Args:
        max_update: updates after which the run ends; 0 for no limit.
        stop_seconds: seconds of training after which it ends; 0 for no limit.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        max_update: int = 0,
        stop_seconds: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_update = max_update
        self.stop_seconds = stop_seconds
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._num_updates = 0
        self._train_wall: tuple[float, float] | None = None

    def write(self, record: Record) -> None:
        train_wall = record.get("train_wall")
        if record.get("kind") == "train" and isinstance(train_wall, int | float):
            self._train_wall = (train_wall, self._clock())

    def advance(self, num_updates: int) -> None:
        self._num_updates = num_updates
        if self._first is None:
            self._first = (num_updates, self._clock())

    def seconds(self) -> float | None:
        """Seconds left, pauses for validation included, or None as long as nobody can tell."""
        now = self._clock()
        estimates = []
        if self.max_update and self._first is not None:
            done, elapsed = self._num_updates - self._first[0], now - self._first[1]
            if done > 0:
                estimates.append((self.max_update - self._num_updates) * elapsed / done)
        if self.stop_seconds and self._train_wall is not None:
            train_wall, seen = self._train_wall
            estimates.append(self.stop_seconds - train_wall - (now - seen))
        return max(min(estimates), 0.0) if estimates else None


class TqdmSink(BaseSink):
    """A bar on standard error: updates done, loss, bits per byte, tokens/s, time left."""

    def __init__(self, time_left: TimeLeft) -> None:
        self._time_left = time_left
        self._bar: Any = None
        self._last: Record = {}

    def write(self, record: Record) -> None:
        if record.get("kind") != "train":
            return
        self._last = record
        self.advance(update_of(record))
        self._bar.set_postfix_str(self._postfix(), refresh=True)

    def advance(self, num_updates: int) -> None:
        bar = self._open(num_updates)
        if num_updates > bar.n:
            bar.set_postfix_str(self._postfix(), refresh=False)
            bar.update(num_updates - bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _open(self, num_updates: int) -> Any:
        if self._bar is None:
            total = self._time_left.max_update or None
            count = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}" if total else "{n_fmt} updates"
            self._bar = tqdm(
                total=total,
                initial=max(num_updates - 1, 0),
                file=sys.stderr,
                **_size(),
                leave=True,
                bar_format=count + "{postfix}",
            )
        return self._bar

    def _postfix(self) -> str:
        parts = []
        for key, label, form in (
            ("loss", "loss", ".3f"),
            ("bits_per_byte", "bits/byte", ".3f"),
            ("wps", "tokens/s", ",.0f"),
        ):
            value = self._last.get(key)
            if isinstance(value, int | float):
                parts.append(f"{label} {value:{form}}")
        seconds = self._time_left.seconds()
        if seconds is not None:
            parts.append(f"left {show_seconds(seconds)}")
        return " ".join(parts)
