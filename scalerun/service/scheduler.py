"""Scheduler: a thread that owns the engine, and the event loop's way to it.

The engine is not thread-safe and its steps take long; the event loop must never wait for one. So
requests and cancellations go to the thread as commands, which it carries out between two steps, and
what a step gave comes back in one piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from scalerun.dataclass.errors import UserError
from scalerun.generation.engine import Engine, Ticket
from scalerun.generation.events import Event, FailedEvent, FinishedEvent, TokenEvent
from scalerun.generation.request import Request
from scalerun.service.errors import OVERLOADED, SERVER, ApiError, bad_field
from scalerun.service.metrics import ServiceMetrics

_RETRY_SECONDS = 1
_STOPPING_RETRY_SECONDS = 10


class Call:
    """The prompts of one HTTP request on their way through the engine. Belongs to the event loop.

    Args:
        requests: one for each prompt.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self.tickets: list[Ticket] = []
        self.arrived = time.monotonic()
        self.unfinished = [request.params.n for request in requests]
        self.last_token: dict[tuple[int, int], float] = {}
        self.begun = [False] * len(requests)
        self._events: deque[tuple[int, Event]] = deque()
        self._ready = asyncio.Event()
        self._is_lost = False

    @property
    def is_finished(self) -> bool:
        """Whether all events have come."""
        return not any(self.unfinished)

    @property
    def num_waiting(self) -> int:
        """Prompts that have no token yet."""
        # Of answers that are ranked, nothing is heard before all are done; the engine knows more.
        started = [ticket.num_new_tokens > 0 for ticket in self.tickets]
        started += [False] * (len(self.begun) - len(started))
        return sum(not (begun or one) for begun, one in zip(self.begun, started, strict=True))

    def put(self, index: int, event: Event) -> None:
        """Take an event of a prompt."""
        if isinstance(event, FailedEvent):
            self.unfinished[index] = 0
        elif isinstance(event, FinishedEvent):
            self.unfinished[index] -= 1
        self._events.append((index, event))
        self._ready.set()

    def fail(self) -> None:
        """No more events will come."""
        self._is_lost = True
        self._ready.set()

    async def take(self) -> list[tuple[int, Event]]:
        """All events that have come since the last call, at least one; empty at the end.

        Raises:
            ApiError: 500, the engine broke down.
        """
        if not self._events and self.is_finished:
            return []
        await self._ready.wait()
        self._ready.clear()
        if self._is_lost:
            raise ApiError(500, "the server broke down; its log says why", type=SERVER)
        events = list(self._events)
        self._events.clear()
        return events


class Scheduler:
    """Runs an engine in a thread of its own.

    Args:
        engine: whatever it computes is computed in that thread.
        max_queue: prompts that may wait for their first token.
        autocast: makes the context to compute in.
        metrics: where to count.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_queue: int,
        autocast: Callable[[], AbstractContextManager[object]],
        metrics: ServiceMetrics,
    ) -> None:
        self.engine = engine
        self.max_queue = max_queue
        self.is_stopping = False
        self.is_broken = False
        self.fault: UserError | None = None
        self._autocast = autocast
        self._metrics = metrics
        metrics.queue_length.set_function(lambda: self.queue_length)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_fault: Callable[[], None] = lambda: None
        self._calls: set[Call] = set()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._outbox: list[tuple[Call, int, Event]] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- the event loop's side ---------------------------------------------------------------

    def start(self, *, on_fault: Callable[[], None]) -> None:
        """Begin to work.

        Args:
            on_fault: called in the thread when the engine broke down.
        """
        self._on_fault = on_fault
        self._thread.start()

    @property
    def is_working(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self.is_stopping

    @property
    def queue_length(self) -> int:
        """Prompts that wait for their first token."""
        return sum(call.num_waiting for call in self._calls)

    def submit(self, requests: Sequence[Request]) -> Call:
        """Put the prompts of one HTTP request into the queue, all or none.

        Raises:
            ApiError: 400 a request cannot be done, 429 the queue is full, 503 the server stops.
        """
        if not self.is_working:
            raise ApiError(
                503,
                "the server is stopping",
                type=SERVER,
                code="stopping",
                retry_after=_STOPPING_RETRY_SECONDS,
            )
        if len(requests) > self.max_queue:
            raise bad_field(
                "prompt", f"has {len(requests)} prompts; this server takes {self.max_queue} at most"
            )
        if self.queue_length + len(requests) > self.max_queue:
            self._metrics.refused.inc()
            raise ApiError(
                429,
                f"{self.queue_length} prompts are waiting already; try again later",
                type=OVERLOADED,
                code="queue_full",
                retry_after=_RETRY_SECONDS,
            )
        self._loop = asyncio.get_running_loop()
        call = Call(requests)
        self._calls.add(call)
        self._metrics.prompt_tokens.inc(sum(len(request.prompt) for request in requests))
        self._command(lambda: self._enter(call))
        return call

    def leave(self, call: Call) -> None:
        """Nobody waits for a call's events any more; what is unfinished is cancelled."""
        if call in self._calls:
            self._calls.remove(call)
            self._command(lambda: self._cancel(call))

    def close(self) -> None:
        """End the thread; what it has begun is lost."""
        self.is_stopping = True
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _deliver(self, events: list[tuple[Call, int, Event]]) -> None:
        now = time.monotonic()
        for call, index, event in events:
            if call not in self._calls:
                continue
            self._count(call, index, event, now)
            call.put(index, event)
            if call.is_finished:
                self._calls.remove(call)

    def _count(self, call: Call, index: int, event: Event, now: float) -> None:
        """Count a token, and the time since the one before it."""
        if not call.begun[index]:
            call.begun[index] = True
            self._metrics.first_token_seconds.observe(now - call.arrived)
        if isinstance(event, TokenEvent):
            before = call.last_token.get((index, event.choice))
            if before is not None:
                self._metrics.token_seconds.observe(now - before)
            call.last_token[index, event.choice] = now
            self._metrics.generated_tokens.inc()
        elif call.requests[index].params.is_ranked and call.unfinished[index] == 1:
            self._metrics.generated_tokens.inc(call.tickets[index].num_new_tokens)

    def _fail_all(self) -> None:
        for call in self._calls:
            call.fail()
        self._calls.clear()

    # -- the thread's side -------------------------------------------------------------------

    def _run(self) -> None:
        done = False
        try:
            busy = False
            while self._obey(wait=not busy):
                with self._autocast():
                    busy = self.engine.step()
                self._metrics.live_rows.set(self.engine.num_live)
                self._flush()
            done = True
        except torch.OutOfMemoryError as error:
            self.fault = UserError(
                f"out of memory: {str(error).splitlines()[0]}; lower --max-num-seqs or "
                "--max-num-tokens"
            )
        finally:
            # What is not caught leaves its traceback in the log. Clients hear of it either way.
            if not done:
                self._break_down()

    def _obey(self, *, wait: bool) -> bool:
        """Carry out the commands that have come; False when it is time to end."""
        with self._wake:
            while wait and not self._commands and not self._closing:
                self._wake.wait()
            commands = list(self._commands)
            self._commands.clear()
            closing = self._closing
        for command in commands:
            command()
        return not closing

    def _enter(self, call: Call) -> None:
        for index, request in enumerate(call.requests):
            call.tickets.append(self.engine.submit(request, self._listener(call, index)))

    def _listener(self, call: Call, index: int) -> Callable[[Event], None]:
        return lambda event: self._outbox.append((call, index, event))

    def _cancel(self, call: Call) -> None:
        for ticket in call.tickets:
            self.engine.cancel(ticket)

    def _flush(self) -> None:
        if self._outbox:
            events, self._outbox = self._outbox, []
            self._tell(lambda: self._deliver(events))

    def _break_down(self) -> None:
        self.is_stopping = self.is_broken = True
        self._tell(self._fail_all)
        self._on_fault()

    def _tell(self, callback: Callable[[], None]) -> None:
        # A loop that has ended has nobody left to tell.
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback)
