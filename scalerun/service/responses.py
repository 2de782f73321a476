"""How an answer travels to a client that may leave at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scalerun.service.errors import ApiError

LEFT = "scalerun.client_left"
"""Key of an ASGI scope whose client has gone."""
_LAST_WORDS_SECONDS = 1.0


Result = TypeVar("Result")


class ClientLeftError(Exception):
    """Nobody listens any more."""


async def read_body(request: Request, *, limit: int) -> bytes:
    """The body of a request.

    Args:
        limit: bytes at most.

    Raises:
        ApiError: 413, it is larger.
        ClientLeftError: the client left before its end.
    """
    too_large = ApiError(
        413, f"the body is larger than the {limit} bytes that this server reads", code="too_large"
    )
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told) > limit:
        raise too_large
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


async def left(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Do some work, for as long as the client is there.

    Raises:
        ClientLeftError: it went first; the work was cancelled.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(left(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """Server-sent events.

    Args:
        pull: gives the next events as text; empty at the end. An ApiError becomes the last event.
        limit: makes the time limit of the whole stream.
        release: called in the end, however it came.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pull: Callable[[], Awaitable[str]],
        *,
        limit: Callable[[], AbstractAsyncContextManager[None]],
        release: Callable[[], None],
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.pull = pull
        self.limit = limit
        self.release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it; leave off where the client does."""
        try:
            await while_connected(receive, self._write(send))
        except ClientLeftError:
            scope[LEFT] = True
        finally:
            self.release()

    async def _write(self, send: Send) -> None:
        headers = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **headers})
        try:
            async with self.limit():
                while text := await self.pull():
                    await _send_text(send, text, more=True)
        except ApiError as error:
            # A client that does not read what it is sent must not hold up the end.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_SECONDS):
                    await _send_text(send, event_text(json.dumps(error.body())), more=True)
        await _send_text(send, "", more=False)


def event_text(data: str) -> str:
    """One server-sent event."""
    return f"data: {data}\n\n"


async def _send_text(send: Send, text: str, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
