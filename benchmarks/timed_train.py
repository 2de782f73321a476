"""``scalerun.cli.train`` with a clock around the making of batches; prints one JSON line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

from scalerun.cli.train import main
from scalerun.data.batch import Batch
from scalerun.data.loader import BatchLoader

WARMUP = 3


class Clock:
    """CPU seconds inside and outside of the loader, from the update after the warm-up on."""

    def __init__(self) -> None:
        self.inside = self.total = 0.0
        self.updates = 0

    def watch(self, updates: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """The same updates."""
        start = before = time.process_time()
        for number, batches in enumerate(updates):
            after = time.process_time()
            if number > WARMUP:
                self.inside += after - before
                self.updates += 1
                self.total = after - start
            else:
                start = after
            yield batches
            before = time.process_time()


def timed_main() -> int:
    """Train as the words of the command line say."""
    clock, original = Clock(), BatchLoader.updates
    BatchLoader.updates = lambda self: clock.watch(original(self))  # type: ignore[method-assign]
    code = main(sys.argv[1:])
    print(
        json.dumps(
            {
                "loader_cpu_ms": 1e3 * clock.inside / clock.updates,
                "update_cpu_ms": 1e3 * clock.total / clock.updates,
            }
        )
    )
    return code


if __name__ == "__main__":
    sys.exit(timed_main())
