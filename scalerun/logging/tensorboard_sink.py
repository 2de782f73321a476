"""TensorBoardSink: records as TensorBoard scalars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.logging.base_sink import BaseSink
from scalerun.logging.records import Record, update_of


def import_tensorboard() -> Any:
    """The class that writes event files.

    Raises:
        ConfigError: the ``tensorboard`` package is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "--tensorboard-logdir needs the tensorboard package: pip install tensorboard"
        ) from error
    return SummaryWriter


def make_logdir(logdir: Path) -> None:
    """Make the folder of event files.

    Raises:
        UserError: it cannot be made.
    """
    try:
        logdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--tensorboard-logdir {logdir} cannot be written: {error.strerror}"
        ) from error


def scalars_of(record: Record) -> dict[str, float]:
    """The numbers of a record that can be drawn against updates, named ``<set>/<name>``.

    The set is ``train`` or the validation set. Events have none.
    """
    if record.get("kind") == "event":
        return {}
    group = record.get("subset", record.get("kind"))
    return {
        f"{group}/{name}": float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and name != "num_updates"
    }


class TensorBoardSink(BaseSink):
    """Writes scalars against the number of updates.

    A restart writes to the same folder; what the killed run drew beyond the update that the restart
    begins with is withdrawn.

    Raises:
        ConfigError: the ``tensorboard`` package is not installed.
        UserError: the folder cannot be written.
    """

    def __init__(self, logdir: Path) -> None:
        self._make_writer = import_tensorboard()
        make_logdir(logdir)
        self.logdir = logdir
        self._writer: Any = None

    def write(self, record: Record) -> None:
        num_updates = update_of(record)
        if record.get("event") == "resumed":
            # The records of the update that the restart begins with were drawn and stay.
            self._open(num_updates + 1)
        scalars = scalars_of(record)
        if not scalars:
            return
        writer = self._open(num_updates)
        for name, value in scalars.items():
            writer.add_scalar(name, value, num_updates)
        writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, first_update: int) -> Any:
        if self._writer is None:
            self._writer = self._make_writer(str(self.logdir), purge_step=first_update)
        return self._writer
