"""Starts the ranks of a run on this host, where no launcher did, and watches over them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch

from scalerun.distributed.launch import end_process
from scalerun.distributed.rendezvous import Rendezvous

ADDRESS = "127.0.0.1"
GRACE_SECONDS = 10.0
"""How long the other ranks may go on after one has failed."""
POLL_SECONDS = 0.05
BACKLOG = 4096
"""Ranks that may knock before anybody answers; the system may allow fewer."""
PARENT_CHECK_SECONDS = 1.0
"""For systems other than Linux, and a parent that ended before the rank had begun."""
_PR_SET_PDEATHSIG = 1
"""Asks Linux for a signal at the parent's end (prctl(2))."""

Outcome = tuple[int, str | None]
"""A process's exit code, and its error in one sentence if it has one."""


@dataclass
class _Child:
    """One rank, as its parent sees it."""

    rank: int
    pid: int
    pipe: int
    code: int | None = None


def run_local_ranks(world_size: int, work: Callable[[Rendezvous], Outcome]) -> Outcome:
    """Call ``work`` in ``world_size`` forked processes, and wait for all of them.

    Signals are handed on. Where a rank fails the others are ended, and where all say the same it is
    said once.

    Args:
        world_size: processes to start. The caller must not have used threads or a GPU yet.
        work: ends with an exit code and an error.

    Returns:
        The first failure, or 0.
    """
    children: list[_Child] = []
    # Listening first: the port is free without a guess, and early ranks queue.
    with socket.create_server((ADDRESS, 0), backlog=BACKLOG) as listener, _handed_on(children):
        port = listener.getsockname()[1]
        for rank in range(world_size):
            place = Rendezvous(rank, world_size, rank, ADDRESS, port, hosts_store=False)
            children.append(_fork(place, work, listener))
        # Not before the last fork: its thread may hold a lock, which would stay shut in a child.
        with _store(listener):
            failed = _wait(children)
    if not failed:
        return 0, None
    for child in failed:
        if child.code and child.code < 0:
            return 1, f"rank {child.rank} was killed by {signal.Signals(-child.code).name}"
    said = [(child, _read(child.pipe)) for child in failed]
    first, text = next(((child, text) for child, text in said if text), said[0])
    everybody = len(said) == world_size and len({text for _, text in said}) == 1
    return first.code or 1, text if everybody or not text else f"rank {first.rank}: {text}"


@contextlib.contextmanager
def _store(listener: socket.socket) -> Iterator[None]:
    """Keep the store that the ranks meet at; the parent does, as it lives longest."""
    host, port = listener.getsockname()
    store = torch.distributed.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )
    yield
    del store


def _fork(
    place: Rendezvous, work: Callable[[Rendezvous], Outcome], listener: socket.socket
) -> _Child:
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writer)
        return _Child(place.rank, pid, reader)
    code = 1
    try:
        os.close(reader)
        listener.close()
        os.setpgid(0, 0)  # a signal from the terminal comes once, from the parent
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.default_int_handler)
        # At once, or else the next command would find the run folder in use.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        code, error = work(place)
        if error is not None:
            os.write(writer, error.encode()[:60000])
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        end_process(code)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)


def _wait(children: list[_Child]) -> list[_Child]:
    """Those that failed, in the order in which they did. All have ended."""
    failed: list[_Child] = []
    deadline = None
    while any(child.code is None for child in children):
        for child in children:
            if child.code is None:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    child.code = os.waitstatus_to_exitcode(status)
                    if child.code:
                        failed.append(child)
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            # What they would say of it is of no interest: they lost a partner.
            _send(children, signal.SIGKILL)
            for child in children:
                if child.code is None:
                    os.waitpid(child.pid, 0)
                    child.code = 1
        time.sleep(POLL_SECONDS)
    return failed


def _send(children: list[_Child], signum: int) -> None:
    for child in children:
        if child.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signum)


@contextlib.contextmanager
def _handed_on(children: list[_Child]) -> Iterator[None]:
    """Hand SIGTERM and SIGINT on to the ranks; they decide when to end."""

    def hand_on(signum: int, frame: FrameType | None) -> None:
        _send(children, signum)

    before = {signum: signal.signal(signum, hand_on) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _read(pipe: int) -> str | None:
    with os.fdopen(pipe, "rb") as stream:
        return stream.read().decode() or None
