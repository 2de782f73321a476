"""UpdateProfiler: torch's profiler over a range of updates."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile

from scalerun.dataclass.errors import UserError

logger = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"
_TABLE_ROWS = 40


class UpdateProfiler:
    """Records the operators of a few updates and writes what it saw to the run folder.

    A context around the whole loop, with :meth:`record` around each update. What comes between two
    updates (validating, saving) is recorded as well. If the loop ends early, the updates recorded
    so far are written. The files are ``profile/trace_<first>-<last>.json`` (for Perfetto or
    ``chrome://tracing``) and ``profile/operators_<first>-<last>.txt``; ranks other than 0 add their
    number.

    Args:
        save_dir: the run folder.
        updates: first and last update to record (from 1, both included), or None to record none.
        device: a CUDA device is recorded as well as the CPU.
        rank: this process among all.
    """

    def __init__(
        self,
        save_dir: Path,
        updates: tuple[int, int] | None,
        *,
        device: torch.device,
        rank: int = 0,
    ) -> None:
        self.folder = save_dir / PROFILE_FOLDER
        self.updates = updates
        self.device = device
        self.rank = rank
        self._profile: Any = None
        self._range = (0, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._finish()

    @contextmanager
    def record(self, update: int) -> Iterator[None]:
        """Context around one update (from 1): recorded if it is in the range.

        Raises:
            UserError: the files cannot be written.
        """
        if self.updates is None or not self.updates[0] <= update <= self.updates[1]:
            yield
            return
        if self._profile is None:
            self._start(update)
        with torch.profiler.record_function(f"update {update}"):
            yield
        self._range = (self._range[0], update)
        if update == self.updates[1]:
            self._finish()

    def _start(self, update: int) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profile.start()
        self._range = (update, update - 1)

    def _finish(self) -> None:
        if self._profile is None:
            return
        profiler, self._profile = self._profile, None
        profiler.stop()
        first, last = self._range
        if last < first:
            return
        name = f"{first}-{last}" + (f".rank{self.rank}" if self.rank else "")
        trace = self.folder / f"trace_{name}.json"
        sort_by = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=sort_by, row_limit=_TABLE_ROWS)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            (self.folder / f"operators_{name}.txt").write_text(table, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{self.folder} cannot be written: {error.strerror}") from error
        logger.info("profile of updates %d to %d: %s", first, last, trace)
