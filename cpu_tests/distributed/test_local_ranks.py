"""The ranks that a plain command starts on its own host."""

import subprocess
import sys

PROGRAM = """
import os
import threading

from scalerun.distributed import local_ranks
from scalerun.distributed.common_error import open_store
from datetime import timedelta

fork = os.fork


def fork_alone():
    threads = len(os.listdir("/proc/self/task"))
    print("threads at a fork:", threads, flush=True)
    return fork()


def meet(place):
    store = open_store(place, timedelta(seconds=30))
    store.add("here", 1)
    while store.add("here", 0) < place.world_size:
        pass
    store.add("seen", 1)
    while store.add("seen", 0) < place.world_size:
        pass
    return 0, None


os.fork = fork_alone
print(local_ranks.run_local_ranks(3, meet))
"""


def test_ranks_are_forked_from_one_thread_and_meet():
    """Another thread may hold a lock of the C library, which no one would open in the child."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["threads at a fork: 1"] * 3 + ["(0, None)"]
