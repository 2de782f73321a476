"""The server's life: it starts, answers, and ends in good order after a signal."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType

import uvicorn

from scalerun.generation.engine import Engine
from scalerun.service.application import Service, ServiceLimits, build_application
from scalerun.service.metrics import ServiceMetrics
from scalerun.service.scheduler import Scheduler
from scalerun.service.schema import Model

_LAST_WORDS_SECONDS = 3.0
"""Until connections are cut whose clients do not read what they are sent."""


@dataclass(frozen=True)
class Settings:
    """How to serve."""

    name: str
    """Of the model, for clients."""
    limits: ServiceLimits
    api_key: str | None = None
    max_queue: int = 64
    """Prompts that may wait for their first token."""
    shutdown_seconds: float = 20.0
    """What answers under way have to end after a signal."""


class _Server(uvicorn.Server):
    """uvicorn's, with our way to end."""

    def __init__(self, config: uvicorn.Config, service: Service, shutdown_seconds: float) -> None:
        super().__init__(config)
        self.service = service
        self.shutdown_seconds = shutdown_seconds
        self.signum: int | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the server in good order, a second one at once."""
        if self.signum is not None:
            self.force_exit = True
            self.end(0.0)
        else:
            self.signum = sig
            self.end(self.shutdown_seconds)

    def end(self, seconds: float = 0.0) -> None:
        """Stop accepting; what is under way has so long to end. May be called by any thread."""
        self.should_exit = True
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.service.drain, seconds)


def serve(
    engine: Engine,
    settings: Settings,
    listener: socket.socket,
    *,
    autocast: Callable[[], AbstractContextManager[object]],
) -> int:
    """Answer requests until a signal comes.

    Args:
        engine: what computes the answers.
        listener: a bound socket; closed in the end.
        autocast: makes the context to compute in.

    Returns:
        The exit code: 0 after SIGTERM, 130 after SIGINT, 1 where the engine broke down.

    Raises:
        UserError: the memory was too small.
    """
    metrics = ServiceMetrics()
    scheduler = Scheduler(engine, max_queue=settings.max_queue, autocast=autocast, metrics=metrics)
    context = engine.model.max_positions()
    service = Service(
        scheduler,
        model=Model(id=settings.name, created=int(time.time()), max_model_len=context),
        limits=settings.limits,
        metrics=metrics,
        api_key=settings.api_key,
    )
    config = uvicorn.Config(
        build_application(service),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_seconds + _LAST_WORDS_SECONDS),
    )
    server = _Server(config, service, settings.shutdown_seconds)
    scheduler.start(on_fault=server.end)
    try:
        server.run(sockets=[listener])
    finally:
        scheduler.close()
    if scheduler.fault is not None:
        raise scheduler.fault
    if scheduler.is_broken:
        return 1
    return 130 if server.signum == signal.SIGINT else 0
