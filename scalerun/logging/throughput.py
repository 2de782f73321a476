"""Throughput: tokens and updates per second, model FLOP/s, peak memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from scalerun.dataclass.errors import UserError

_MATMUL_SIZE = 1024
_GIB = 2**30


def measure_matmul_rate(
    device: torch.device, dtype: torch.dtype, *, budget_seconds: float = 0.2
) -> float:
    """FLOP/s of a 1024 x 1024 x 1024 matrix product: the best of those that fit in the budget.

    Uses as many threads as torch is set to. It is the denominator of ``mfu``: the rate that this
    machine reaches now, not one from a data sheet. At least two products are timed, the first
    product warms up.
    """
    size = _MATMUL_SIZE
    # Ones, not random numbers: no draw may touch the generators of the run.
    a = torch.ones(size, size, device=device, dtype=dtype)
    out = torch.empty_like(a)

    def one_product() -> float:
        start = time.perf_counter()
        torch.matmul(a, a, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    end = time.perf_counter() + budget_seconds
    one_product()
    best = min(one_product(), one_product())
    while time.perf_counter() < end:
        best = min(best, one_product())
    return 2.0 * size**3 / best


def peak_memory(device: torch.device) -> dict[str, float]:
    """Largest memory use so far, in GiB.

    ``peak_memory_gib`` is what torch allocated on a CUDA device, with ``peak_reserved_gib`` for
    what it holds there, and the resident size of this process on a CPU.
    """
    if device.type == "cuda":
        return {
            "peak_memory_gib": torch.cuda.max_memory_allocated(device) / _GIB,
            "peak_reserved_gib": torch.cuda.max_memory_reserved(device) / _GIB,
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return {"peak_memory_gib": peak * (1 if sys.platform == "darwin" else 1024) / _GIB}


class Throughput:
    """Counts what updates consume and how long they take.

    Time inside :meth:`pause` (validating, saving) belongs to no update. All counts are those of the
    whole update, over all data-parallel ranks.

    Args:
        device: whose peak memory is reported.
        flops_per_token: of forward and backward; None leaves ``tflops`` and ``mfu`` out.
        matmul_rate: FLOP/s that count as full use of one device; None leaves ``mfu`` out.
        num_devices: devices that share the work; ``tflops`` and ``mfu`` are for each of them.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        flops_per_token: int | None = None,
        matmul_rate: float | None = None,
        num_devices: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device = device
        self.flops_per_token = flops_per_token
        self.matmul_rate = matmul_rate
        self.num_devices = num_devices
        self.tokens_seen = 0
        self._clock = clock
        self._updates = self._tokens = self._sequences = 0
        self._interval_seconds = 0.0
        self._train_wall = 0.0
        self._running_since: float | None = None

    @property
    def train_wall(self) -> float:
        """Seconds spent in updates, those of earlier runs from the same checkpoint included."""
        return self._train_wall + self._elapsed()

    def start(self) -> None:
        """Start the clock; call it when the first update begins. A running clock goes on."""
        if self._running_since is None:
            self._running_since = self._clock()

    def stop(self) -> None:
        """Stop the clock and keep what it showed."""
        self._settle()
        self._running_since = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside this context counts for no update; may be nested."""
        was_running = self._running_since is not None
        self.stop()
        try:
            yield
        finally:
            if was_running:
                self.start()

    def update(self, tokens: int, sequences: int) -> None:
        """Count one finished update.

        Args:
            tokens: target tokens of the update.
            sequences: sequences of the update.
        """
        self.start()
        self._updates += 1
        self._tokens += tokens
        self._sequences += sequences
        self.tokens_seen += tokens

    def flush(self) -> dict[str, float]:
        """The numbers of the updates since the last flush; start the next interval.

        ``wps``, ``ups``: target tokens and updates per second; ``wpb``, ``bsz``: target tokens and
        sequences per update; ``tokens_seen``: target tokens of the whole run; ``train_wall``:
        seconds; ``tflops``: model TFLOP/s of each device; ``mfu``: its share of the matmul rate.
        """
        self._settle()
        seconds, updates = self._interval_seconds, max(self._updates, 1)
        wps = self._tokens / seconds if seconds else 0.0
        record: dict[str, float] = {
            "wps": wps,
            "ups": self._updates / seconds if seconds else 0.0,
            "wpb": self._tokens / updates,
            "bsz": self._sequences / updates,
            "tokens_seen": self.tokens_seen,
            "train_wall": self._train_wall,
        }
        if self.flops_per_token is not None:
            rate = wps * self.flops_per_token / self.num_devices
            record["tflops"] = rate / 1e12
            if self.matmul_rate is not None:
                record["mfu"] = rate / self.matmul_rate
        record.update(peak_memory(self.device))
        self._updates = self._tokens = self._sequences = 0
        self._interval_seconds = 0.0
        return record

    def state_dict(self) -> dict[str, float]:
        """Counts and seconds, those of the unfinished interval too, as JSON values."""
        self._settle()
        return {
            "tokens_seen": self.tokens_seen,
            "train_wall": self._train_wall,
            "updates": self._updates,
            "tokens": self._tokens,
            "sequences": self._sequences,
            "interval_seconds": self._interval_seconds,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a :meth:`state_dict`.

        Raises:
            UserError: the state was written by something else.
        """
        try:
            self.tokens_seen = int(state["tokens_seen"])
            self._train_wall = float(state["train_wall"])
            self._updates = int(state["updates"])
            self._tokens = int(state["tokens"])
            self._sequences = int(state["sequences"])
            self._interval_seconds = float(state["interval_seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                "the checkpoint's counts of tokens and time cannot be read; start a new run "
                "from it: --save-dir NEW --restore-file OLD --reset-meters"
            ) from error

    def _elapsed(self) -> float:
        return 0.0 if self._running_since is None else self._clock() - self._running_since

    def _settle(self) -> None:
        if self._running_since is None:
            return
        now = self._clock()
        elapsed = now - self._running_since
        self._interval_seconds += elapsed
        self._train_wall += elapsed
        self._running_since = now
