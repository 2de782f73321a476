"""Deadlines: how long requests may take, and that none outlives the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from scalerun.service.errors import SERVER, ApiError


class Deadlines:
    """The time limits of all requests under way. Belongs to the event loop.

    Args:
        seconds: from a request's arrival to the end of its answer.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._running: set[asyncio.Timeout] = set()
        self._last: float | None = None

    @contextlib.asynccontextmanager
    async def limit(self, arrived: float) -> AsyncIterator[None]:
        """Do what follows in the time that a request has left.

        Args:
            arrived: when the request came, by the loop's clock.

        Raises:
            ApiError: 504 it took too long, 503 the server stops before it is done.
        """
        when = arrived + self.seconds
        if self._last is not None:
            when = min(when, self._last)
        try:
            async with asyncio.timeout_at(when) as timeout:
                self._running.add(timeout)
                try:
                    yield
                finally:
                    self._running.discard(timeout)
        except TimeoutError as error:
            if self._last is not None and asyncio.get_running_loop().time() >= self._last:
                raise ApiError(
                    503, "the server is stopping", type=SERVER, code="stopping", retry_after=10
                ) from error
            raise ApiError(
                504,
                f"the answer took longer than the {self.seconds:g} seconds that this server allows",
                type=SERVER,
                code="timeout",
            ) from error

    def end_within(self, seconds: float) -> None:
        """From now on nothing may take longer than this; also of what is under way."""
        self._last = asyncio.get_running_loop().time() + seconds
        for timeout in self._running:
            when = timeout.when()
            if when is None or when > self._last:
                timeout.reschedule(self._last)
