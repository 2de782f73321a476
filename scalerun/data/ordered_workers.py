"""OrderedWorkers: one function in several processes, its results in the order of the work."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from scalerun.data.text.preparation import quiet_fork
from scalerun.dataclass.errors import UserError

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class OrderedWorkers(Generic[Piece, Result]):
    """Calls a function for many pieces of work.

    The results depend neither on the number of processes nor on their speed. At most one piece for
    each of them is under way, so memory stays bounded. The processes end with this object, and by
    themselves when their parent is gone. Use as a context manager.

    Args:
        work: the function; it may raise :class:`UserError`.
        count: processes; 1 does the work here.
    """

    def __init__(self, work: Callable[[Piece], Result], count: int) -> None:
        self._work = work
        self._workers: list[tuple[BaseProcess, Connection]] = []
        context = multiprocessing.get_context("fork")
        with quiet_fork():
            for _ in range(count if count > 1 else 0):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(work, theirs, ours), daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _, connection in self._workers:
            connection.close()
        # The last one first: each has the ends of the earlier ones' pipes open.
        for process, _ in reversed(self._workers):
            process.join()

    def map(self, pieces: Iterable[Piece]) -> Iterator[Result]:
        """The result of each piece, in order.

        Raises:
            UserError: the work raised it, at its place; or a process has ended.
        """
        if not self._workers:
            yield from map(self._work, pieces)
            return
        idle = deque(connection for _, connection in self._workers)
        busy: deque[Connection] = deque()
        for piece in pieces:
            if not idle:
                idle.append(busy.popleft())
                yield _received(idle[0])
            connection = idle.popleft()
            with contextlib.suppress(ConnectionError):  # told when its result is asked for
                connection.send(piece)
            busy.append(connection)
        for connection in busy:
            yield _received(connection)


def _received(connection: Connection) -> Any:
    try:
        result = connection.recv()
    except (EOFError, ConnectionError) as error:
        raise UserError(
            "a worker process has ended by itself, perhaps killed for want of memory; lower "
            "--workers"
        ) from error
    if isinstance(result, UserError):
        raise result
    return result


def _serve(work: Callable[[Any], Any], own: Connection, parents: Connection) -> None:
    parents.close()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while True:
        try:
            piece = own.recv()
        except (EOFError, ConnectionError):
            return
        result: Any
        try:
            result = work(piece)
        except UserError as error:
            result = error
        try:
            own.send(result)
        except ConnectionError:
            return
