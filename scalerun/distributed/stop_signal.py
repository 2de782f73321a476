"""SIGINT and SIGTERM: the first asks for an orderly stop, the second stops at once."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Self

logger = logging.getLogger(__name__)


class StopRequestedError(BaseException):
    """Raised where an orderly stop needs no more than unwinding. Carries the signal's number."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopSignal:
    """Catches SIGINT and SIGTERM while it is entered.

    Outside :meth:`deferred` a signal raises :class:`StopRequestedError` where the program stands.
    Inside, it only sets :attr:`signum`, and the caller looks at it when it is ready.

    Args:
        announce: say that it came; one of several ranks is enough.
    """

    def __init__(self, *, announce: bool = True) -> None:
        self.announce = announce
        self.signum: int | None = None
        self._deferring = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM, else 0."""
        return 0 if self.signum is None else 128 + self.signum

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Let signals wait until the caller looks."""
        before, self._deferring = self._deferring, True
        try:
            yield
        finally:
            self._deferring = before

    @contextlib.contextmanager
    def immediate(self) -> Iterator[None]:
        """Inside :meth:`deferred`: a wait that a signal may break off."""
        before, self._deferring = self._deferring, False
        try:
            if self.signum is not None:
                raise StopRequestedError(self.signum)
            yield
        finally:
            self._deferring = before

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            os._exit(128 + signum)
        self.signum = signum
        name = signal.Signals(signum).name
        if self.announce:
            logger.warning("%s: stopping; a second signal stops at once and saves nothing", name)
        if not self._deferring:
            raise StopRequestedError(signum)
