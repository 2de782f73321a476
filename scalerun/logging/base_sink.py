"""BaseSink: somewhere that records go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from scalerun.logging.records import Record


class BaseSink(ABC):
    """Receives every record of a run, in order."""

    @abstractmethod
    def write(self, record: Record) -> None:
        """Take one record; it is on its way out when this returns."""

    def advance(self, num_updates: int) -> None:  # noqa: B027
        """Hear that an update is done; called after each of them, so it has to be cheap."""

    def close(self) -> None:  # noqa: B027
        """Write what is still held back; nothing is written afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
