"""What a run shows on the terminal: log messages, text lines, JSON lines.

People read standard error; standard output carries nothing but JSON lines, and only with
``--log-format json``.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from scalerun.dataclass.errors import UserError
from scalerun.logging.base_sink import BaseSink
from scalerun.logging.progress_bar import TimeLeft, show_seconds
from scalerun.logging.records import Record, describe_record, encode_record

RECORD_LOGGER = "scalerun.records"
"""Name of the logger that every record passes as one line of text."""

_WARN_ABOUT = ("skipped", "bad_record")
_HIDDEN_KINDS: dict[str, tuple[str, ...]] = {
    "simple": (),
    "tqdm": ("train",),
    "json": ("train", "valid", "event"),
    "none": ("train", "valid", "event"),
}


def resolve_log_format(log_format: str, stream: IO[str] | None = None) -> str:
    """``auto`` becomes ``tqdm`` where standard error is a terminal, else ``simple``."""
    if log_format != "auto":
        return log_format
    stream = sys.stderr if stream is None else stream
    return "tqdm" if stream.isatty() else "simple"


class ConsoleHandler(logging.StreamHandler[IO[str]]):
    """Writes messages to standard error, above a progress bar if there is one.

    Args:
        hidden_kinds: records of these kinds are shown by a sink of their own, not here.
    """

    def __init__(self, hidden_kinds: tuple[str, ...] = ()) -> None:
        super().__init__(sys.stderr)
        self.hidden_kinds = hidden_kinds
        self.addFilter(lambda message: getattr(message, "kind", None) not in self.hidden_kinds)

    def emit(self, record: logging.LogRecord) -> None:
        # Looked up each time: whoever redirects sys.stderr later is obeyed.
        self.stream = sys.stderr
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _RunFileHandler(logging.FileHandler):
    """Marks the file handler that :func:`setup_logging` put in, so that it can be replaced."""


def setup_logging(
    log_format: str = "simple",
    *,
    log_file: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    level: int = logging.INFO,
) -> None:
    """Send the messages of this process to standard error and, on rank 0, to a file.

    Ranks other than 0 only show warnings. With several ranks each message names its rank. Calling
    it again replaces what the last call set up.

    Args:
        log_format: a value of ``--log-format``; ``none`` leaves warnings and errors.
        log_file: a file that is appended to and gets every message and every record.

    Raises:
        UserError: the log file cannot be opened.
    """
    root = logging.getLogger()
    close_logging()
    log_format = resolve_log_format(log_format)
    rank_text = f"[rank {rank}] " if world_size > 1 else ""
    formatter = logging.Formatter(
        f"%(asctime)s | %(levelname)s | {rank_text}%(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    console = ConsoleHandler(_HIDDEN_KINDS[log_format])
    console.setFormatter(formatter)
    if rank != 0 or log_format == "none":
        console.setLevel(logging.WARNING)
    root.addHandler(console)
    if log_file is not None and rank == 0:
        path = Path(log_file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handler = _RunFileHandler(path, mode="a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--log-file {path} cannot be written: {error.strerror}") from error
        handler.setFormatter(formatter)
        root.addHandler(handler)
    # Only our own loggers speak at this level; libraries keep to the root's.
    logging.getLogger("scalerun").setLevel(level)


def close_logging() -> None:
    """Take back what :func:`setup_logging` set up; close the log file."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, ConsoleHandler | _RunFileHandler):
            root.removeHandler(handler)
            handler.close()


class TextSink(BaseSink):
    """Every record as a line of text through the ``scalerun.records`` logger.

    The handlers decide where it goes: always to ``--log-file``, and to the terminal unless another
    sink shows it there.
    """

    def __init__(self, time_left: TimeLeft) -> None:
        self._logger = logging.getLogger(RECORD_LOGGER)
        self._time_left = time_left

    def write(self, record: Record) -> None:
        text = describe_record(record)
        kind = record.get("kind")
        if kind == "train":
            seconds = self._time_left.seconds()
            text += f" | left {show_seconds(seconds)}" if seconds is not None else ""
        event = record.get("event")
        warn = kind == "event" and event in _WARN_ABOUT
        extra: dict[str, Any] = {} if warn else {"kind": kind}
        self._logger.log(logging.WARNING if warn else logging.INFO, "%s", text, extra=extra)


class JsonSink(BaseSink):
    """Every record as one line of JSON on standard output, without any prefix."""

    def write(self, record: Record) -> None:
        sys.stdout.write(encode_record(record) + "\n")
        sys.stdout.flush()
