"""Sinks: where the records of a run go, all together."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scalerun.dataclass.configs import CommonConfig
from scalerun.dataclass.errors import UserError
from scalerun.logging.aim_sink import AimSink, import_aim
from scalerun.logging.base_sink import BaseSink
from scalerun.logging.console import JsonSink, TextSink, resolve_log_format
from scalerun.logging.progress_bar import TimeLeft, TqdmSink
from scalerun.logging.records import Record, encode_record, parse_record
from scalerun.logging.tensorboard_sink import TensorBoardSink, import_tensorboard, make_logdir
from scalerun.logging.wandb_sink import WandbSink, import_wandb

METRICS_FILE = "metrics.jsonl"


class JsonlSink(BaseSink):
    """Appends each record to a file as one line of JSON, with one write call.

    A line that a kill cut short is removed when the file is opened; a whole record that lacks only
    its line feed gets one. A file that somebody deletes is made again.

    Raises:
        UserError: the file cannot be opened or written, for instance on a full disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise self._failure(error) from error

    def write(self, record: Record) -> None:
        line = (encode_record(record) + "\n").encode()
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                self._file.close()
                self._open()
            written = self._file.write(line)
        except OSError as error:
            raise self._failure(error) from error
        if written != len(line):
            raise UserError(f"{self.path} cannot be written: the disk is full")

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        self._heal()

    def _heal(self) -> None:
        size = self._file.seek(0, io.SEEK_END)
        tail = b""
        start = size
        while start > 0 and b"\n" not in tail:
            step = min(start, 65536)
            start -= step
            self._file.seek(start)
            tail = self._file.read(step) + tail
        torn = tail.rpartition(b"\n")[2]
        if not torn:
            return
        if parse_record(torn) is not None:
            self._file.write(b"\n")
        else:
            self._file.truncate(size - len(torn))

    def _failure(self, error: OSError) -> UserError:
        if not self.path.parent.exists():
            return UserError(f"{self.path.parent} is gone: it was deleted or moved during the run")
        return UserError(f"{self.path} cannot be written: {error.strerror}")


class SinkGroup(BaseSink):
    """Hands everything to several sinks, in order. Empty on every rank but the first.

    Several threads may write: one that saves a checkpoint in the background reports it here.
    """

    def __init__(self, sinks: Sequence[BaseSink]) -> None:
        self.sinks = list(sinks)
        self._lock = threading.Lock()

    def write(self, record: Record) -> None:
        with self._lock:
            for sink in self.sinks:
                sink.write(record)

    def advance(self, num_updates: int) -> None:
        for sink in self.sinks:
            sink.advance(num_updates)

    def close(self) -> None:
        sinks, self.sinks = self.sinks, []
        with ExitStack() as stack:
            for sink in sinks:
                stack.callback(sink.close)


def check_trackers(cfg: CommonConfig) -> None:
    """Import what the trackers need, which start much later.

    Raises:
        ConfigError: a tracker's package is not installed; the message says what to install.
        UserError: the folder of ``--tensorboard-logdir`` cannot be made.
    """
    if cfg.tensorboard_logdir is not None:
        import_tensorboard()
        make_logdir(Path(cfg.tensorboard_logdir))
    if cfg.wandb_project is not None:
        import_wandb()
    if cfg.aim_repo is not None:
        import_aim()


def build_sinks(
    cfg: CommonConfig,
    *,
    save_dir: Path,
    run_config: dict[str, Any],
    rank: int = 0,
    max_update: int = 0,
    stop_time_hours: float = 0.0,
) -> SinkGroup:
    """All sinks that a run asks for, with ``metrics.jsonl`` in the run folder in every case.

    Args:
        cfg: the log format and the trackers.
        save_dir: the run folder; trackers keep there what lets a restart continue their run.
        run_config: the whole configuration, for trackers that show it.
        rank: ranks other than 0 get a group without sinks.
        max_update: end of the run in updates, for the bar and the time left; 0 where unknown.
        stop_time_hours: end of the run in hours of training; 0 for no such limit.

    Raises:
        ConfigError: a tracker's package is not installed; the message says what to install.
        UserError: the run folder or a tracker's folder cannot be written.
    """
    if rank != 0:
        return SinkGroup([])
    time_left = TimeLeft(max_update, stop_time_hours * 3600)
    makers: list[Callable[[], BaseSink]] = [
        lambda: JsonlSink(save_dir / METRICS_FILE),
        lambda: time_left,
        lambda: TextSink(time_left),
    ]
    log_format = resolve_log_format(cfg.log_format)
    if log_format == "tqdm":
        makers.append(lambda: TqdmSink(time_left))
    elif log_format == "json":
        makers.append(JsonSink)
    if cfg.tensorboard_logdir is not None:
        logdir = Path(cfg.tensorboard_logdir)
        makers.append(lambda: TensorBoardSink(logdir))
    if cfg.wandb_project is not None:
        project = cfg.wandb_project
        makers.append(lambda: WandbSink(project, save_dir=save_dir, run_config=run_config))
    if cfg.aim_repo is not None:
        repo = cfg.aim_repo
        makers.append(lambda: AimSink(repo, save_dir=save_dir, run_config=run_config))
    group = SinkGroup([])
    try:
        for make in makers:
            group.sinks.append(make())
    except UserError:
        group.close()
        raise
    return group
