"""What tasks have in common that tokenise text files, each once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option


@dataclass
class TextFilesConfig(ScalerunDataclass):
    """What is done with bad records, and where tokens are kept."""

    bad_records: str = option(
        "stop",
        "stop at a record that cannot be used, or skip it and list it in quarantine.jsonl",
        choices=("stop", "skip"),
    )
    cache_dir: str | None = option(
        None, "folder for tokenised data, to share between runs (default: in the run folder)"
    )

    def cache_folder(self, default: Path) -> Path:
        """Where tokens are kept."""
        return default if self.cache_dir is None else Path(self.cache_dir)


def usable_cpus() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
