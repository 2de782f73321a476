"""An error that every rank of a launched job ends with is said once, by rank 0.

A launcher's processes know nothing of each other while they start, and little once one has failed;
what they leave in the launcher's store tells whether an error is everybody's.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import Store

    from scalerun.distributed.rendezvous import Rendezvous

PATIENCE_SECONDS = 3.0
"""How long an error waits for ranks of which nothing is known to have it too."""
POLL_SECONDS = 0.02
CONNECT_SECONDS = 0.2
"""Between two tries to reach the host of the store."""
MEETING_POLL_SECONDS = 1.0
"""At most, between two looks whether all have come."""
_JOINED, _ERRORS, _SAID, _HEARD = "joined", "errors", "said", "heard"


def open_store(place: Rendezvous, timeout: timedelta) -> Store:
    """The key-value store that the ranks of this attempt meet at.

    Raises:
        RuntimeError: it cannot be reached.
    """
    if not place.hosts_store:
        _wait_for_host(place, timeout)
    store = torch.distributed.TCPStore(
        place.address,
        place.port,
        place.world_size,
        is_master=place.hosts_store,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,  # it may be opened twice in the process that keeps it
    )
    # Without the prefix a restarted process would read its predecessor's address.
    return torch.distributed.PrefixStore(f"attempt_{place.attempt}", store)


def _wait_for_host(place: Rendezvous, timeout: timedelta) -> None:
    """Wait until somebody listens where the store is to be; torch's own wait prints its stack."""
    end = time.monotonic() + timeout.total_seconds()
    while True:
        left = end - time.monotonic()
        try:
            with socket.create_connection((place.address, place.port), max(left, POLL_SECONDS)):
                return
        except OSError as error:
            if left < CONNECT_SECONDS:
                raise RuntimeError(f"{error.strerror or error}") from error
        time.sleep(CONNECT_SECONDS)


def meet(store: Store, world_size: int, timeout: timedelta) -> None:
    """Leave word that this rank has got as far as to meet the others, and wait for theirs.

    Raises:
        RuntimeError: not all have come in time.
    """
    come = store.add(_JOINED, 1)
    end = time.monotonic() + timeout.total_seconds()
    pause = POLL_SECONDS / 4
    while come < world_size:
        if time.monotonic() > end:
            raise RuntimeError(f"{come} of {world_size} came")
        time.sleep(pause)
        pause = min(1.5 * pause, MEETING_POLL_SECONDS)  # a thousand ranks ask one host
        come = store.add(_JOINED, 0)


def say_error(text: str, place: Rendezvous | None, say: Callable[[str], None]) -> None:
    """Say an error: with the rank, or where all ranks have it on rank 0 alone and without.

    Args:
        place: of this process in a job; None where it is alone.
        say: called at most once.
    """
    if place is None or place.world_size == 1:
        say(text)
        return
    with _signals_seen() as interrupted:
        try:
            store = open_store(place, timedelta(seconds=PATIENCE_SECONDS))
            common = _is_common(text, place, store, interrupted)
        except RuntimeError:  # who kept the store is gone
            common = False
        if not common:
            say(f"rank {place.rank}: {text}")
            return
        if place.rank == 0:
            say(text)
        with contextlib.suppress(RuntimeError):
            _wait_until_said(place, store, interrupted)


def _is_common(text: str, place: Rendezvous, store: Store, interrupted: Callable[[], bool]) -> bool:
    """Whether every rank has this error; False as soon as one is known not to."""
    own = f"{_ERRORS}/{hashlib.sha256(text.encode()).hexdigest()}"
    # Where all have joined nothing but their errors tells how they are.
    starting = store.add(_JOINED, 0) < place.world_size
    for key in (own, _ERRORS):
        store.add(key, 1)

    def differs() -> bool:
        if starting and store.add(_JOINED, 0):
            return True
        return store.add(_ERRORS, 0) > store.add(own, 0)

    return _until(lambda: store.add(own, 0) == place.world_size, lambda: interrupted() or differs())


def _wait_until_said(place: Rendezvous, store: Store, interrupted: Callable[[], bool]) -> None:
    """Stay until rank 0 has said it, so that no launcher ends it before, and others have heard."""
    if place.rank:
        _until(lambda: store.add(_SAID, 0) > 0, interrupted)
        store.add(_HEARD, 1)
        return
    store.add(_SAID, 1)
    if place.hosts_store:
        _until(lambda: store.add(_HEARD, 0) == place.world_size - 1, interrupted)


def _until(condition: Callable[[], bool], broken_off: Callable[[], bool]) -> bool:
    """Whether something came to be within the patience, and before the wait was broken off."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if broken_off() or time.monotonic() > end:
            return False
        time.sleep(POLL_SECONDS)
    return True


@contextlib.contextmanager
def _signals_seen() -> Iterator[Callable[[], bool]]:
    """Let a signal end the waiting and not the process, which has something to say."""
    seen: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        seen.append(signum)

    before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
