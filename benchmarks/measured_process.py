"""Runs a command and says what it cost."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What a finished process used, its own finished children included."""

    cpu_s: float
    wall_s: float
    peak_rss_mb: float
    output: str
    """Its standard output."""


def quiet_environment(threads: int) -> dict[str, str]:
    """The environment of every measured process.

    Threads that wait must sleep: spinning ones cost CPU time that belongs to nobody's work, and on
    a shared machine a multiple of it.
    """
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }


def run(command: Sequence[str], environment: Mapping[str, str]) -> Cost:
    """Run a command to its end.

    Raises:
        SystemExit: it failed; its error output is the message.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=dict(environment))
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            shown = " ".join(command)
            raise SystemExit(f"{shown} ended with {process.returncode}:\n{errors.read()[-2000:]}")
        return Cost(
            cpu_s=usage.ru_utime + usage.ru_stime,
            wall_s=wall,
            peak_rss_mb=usage.ru_maxrss / 1024,
            output=output.read(),
        )
