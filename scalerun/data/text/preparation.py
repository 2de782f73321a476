"""BackgroundPreparation: tokenises the next shard while the current one is read."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess

from scalerun.data.text.layout import TextFile
from scalerun.data.text.token_cache import PreparationStopped, TokenCache
from scalerun.dataclass.errors import UserError

logger = logging.getLogger(__name__)

NICENESS = 5


class BackgroundPreparation:
    """At most one process that fills the token cache.

    Nothing depends on it: a file that it did not finish, for whatever reason, is tokenised by
    whoever needs it. It ends by itself when its parent is gone.
    """

    def __init__(self, cache: TokenCache) -> None:
        self.cache = cache
        self._process: BaseProcess | None = None

    @property
    def is_running(self) -> bool:
        """Whether the process is at work."""
        return self._process is not None and self._process.is_alive()

    def start(self, files: Sequence[TextFile]) -> bool:
        """Tokenise files in the background; returns whether the process was free to do so."""
        if self.is_running or multiprocessing.current_process().daemon:
            return False
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_prepare, args=(self.cache, files, os.getpid()))
        process.daemon = True
        with quiet_fork():
            process.start()
        self._process = process
        return True


@contextlib.contextmanager
def quiet_fork() -> Iterator[None]:
    """Start processes in here: they are born with SIGINT and SIGTERM blocked.

    A signal to the whole process group then reaches the parent only, which decides what it means.
    Python's warning about threads is silenced: such a process touches none of the parent's locks.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare(cache: TokenCache, files: Sequence[TextFile], parent: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # multiprocessing ends it so
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.nice(NICENESS)
    cache.num_threads = 1
    try:
        for file in files:
            cache.load(file, should_stop=lambda: os.getppid() != parent)
    except PreparationStopped:
        sys.exit(1)
    except UserError as error:
        logger.warning("the next shard cannot be prepared, training will stop there: %s", error)
        sys.exit(1)
    cache.digests.save()
