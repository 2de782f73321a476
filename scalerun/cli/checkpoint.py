"""Look at, check, and pass on checkpoints: ``python -m scalerun.cli.checkpoint VERB PATH …``."""

from __future__ import annotations

import difflib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scalerun import __version__
from scalerun.cli.entry import run_cli
from scalerun.cli.output_file import prepare_new_file, refuse_full_folder
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.parser import parse_config
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.logging.console import setup_logging

logger = logging.getLogger("scalerun.cli.checkpoint")  # also when run as __main__

PATH = "run folder, checkpoint folder or pointer file"
SUFFIX = ".safetensors"


@dataclass
class CheckpointVerbConfig(ScalerunDataclass):
    """What every verb is told first."""

    path: str = option("", PATH, positional=True)

    def validate(self) -> None:
        if not self.path:
            raise ConfigError("PATH is missing: give a run folder or a checkpoint folder")


@dataclass
class InspectConfig(CheckpointVerbConfig):
    """What ``inspect`` can be told."""

    part: str | None = option(
        None, "list the tensors of one part", choices=("model", "optimizer", "ema")
    )
    json: bool = option(False, "print one JSON object")


@dataclass
class FileConfig(CheckpointVerbConfig):
    """What the verbs that write one file of weights can be told."""

    output: str = option("", f"file to write; ends in {SUFFIX}")
    part: str = option(
        "model", "the weights, or their average of --store-ema", choices=("model", "ema")
    )
    force: bool = option(False, "replace a file that is there")

    def validate(self) -> None:
        super().validate()
        if Path(self.output).suffix != SUFFIX:
            raise ConfigError(f"--output is {self.output!r}; name a file that ends in {SUFFIX}")


@dataclass
class ConsolidateConfig(FileConfig):
    """What ``consolidate`` can be told."""

    dtype: str | None = option(
        None,
        "number format of the weights (default: as they are stored)",
        choices=("float32", "bfloat16", "float16"),
    )


@dataclass
class ConvertConfig(FileConfig):
    """What ``convert`` can be told."""

    to: str | None = option(None, "the library that will read it", choices=("torchscale",))
    user_dir: str | None = option(None, "folder with plug-in code (default: the one of the run)")

    def validate(self) -> None:
        super().validate()
        if self.to is None:
            raise ConfigError("--to is required: the library that will read it (torchscale)")


@dataclass
class AverageConfig(ScalerunDataclass):
    """What ``average`` can be told."""

    paths: list[str] = option([], f"two or more: each a {PATH}", positional=True)
    last: int | None = option(None, "take the newest N checkpoints of the one run that is named")
    output: str = option("", "run folder to write; must be empty or new")
    user_dir: str | None = option(None, "folder with plug-in code (default: the one of the run)")

    def validate(self) -> None:
        if not self.output:
            raise ConfigError("--output is required: the run folder to write")
        if self.last is not None and self.last < 2:
            raise ConfigError(f"--last is {self.last}; give 2 or more")
        if self.last is not None and len(self.paths) != 1:
            raise ConfigError(f"--last takes one run folder; {len(self.paths)} were given")
        if self.last is None and len(self.paths) < 2:
            raise ConfigError("a mean needs two checkpoints or more: name them, or give --last N")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb = words[0] if words else ""
    if verb in ("--help", "-h"):
        print(usage())
        return 0
    if verb == "--version":
        print(f"scalerun-checkpoint {__version__}")
        return 0
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        given = f"{verb!r} is not a verb{hint}" if verb else "the verb is missing"
        raise ConfigError(f"{given} (verbs: {', '.join(VERBS)})")
    config_class, run, _ = VERBS[verb]
    cfg = parse_config(config_class, words[1:], prog=f"scalerun-checkpoint {verb}")
    setup_logging()
    return run(cfg, words)


def usage() -> str:
    """What ``--help`` prints without a verb."""
    lines = ["usage: scalerun-checkpoint VERB PATH [flags]; VERB --help lists the flags", ""]
    return "\n".join(lines + [f"  {verb:12} {text}" for verb, (_, _, text) in VERBS.items()])


# The verbs import late, so that --help and a mistyped flag need not wait for torch's distributed
# packages.


def inspect(cfg: InspectConfig, words: list[str]) -> int:
    """Print what a checkpoint holds."""
    from scalerun.checkpoint.inspection import inspect_checkpoint
    from scalerun.cli.checkpoint_report import format_summary, format_tensors, to_record

    found = inspect_checkpoint(cfg.path)
    if cfg.json:
        print(json.dumps(to_record(found, cfg.part), indent=1))
    else:
        print(format_summary(found) if cfg.part is None else format_tensors(found, cfg.part))
    return 0


def verify(cfg: CheckpointVerbConfig, words: list[str]) -> int:
    """Read every byte and print a line for each checkpoint; 1 if one is damaged."""
    from scalerun.checkpoint.inspection import verify_all
    from scalerun.cli.checkpoint_report import format_finding

    faults = 0
    for finding in verify_all(cfg.path):
        print(format_finding(finding), flush=True)
        faults += finding.fault is not None
    return int(faults > 0)


def consolidate(cfg: ConsolidateConfig, words: list[str]) -> int:
    """Write the weights as one file."""
    from scalerun.cli.weight_export import consolidated

    output = Path(cfg.output)
    prepare_new_file("--output", output, force=cfg.force)
    dtype = None if cfg.dtype is None else getattr(torch, cfg.dtype)
    report_file(output, *consolidated(cfg.path, output, part=cfg.part, dtype=dtype))
    return 0


def average(cfg: AverageConfig, words: list[str]) -> int:
    """Write the mean of checkpoints as a run."""
    from scalerun.cli.averaged_run import average_runs

    output = Path(cfg.output)
    refuse_full_folder("--output", output)
    checkpoint, folders = average_runs(
        cfg.paths, output, last=cfg.last, user_dir=cfg.user_dir, words=words
    )
    logger.info("%s is the mean of %s", checkpoint, ", ".join(map(str, folders)))
    return 0


def convert(cfg: ConvertConfig, words: list[str]) -> int:
    """Write the weights under another library's names, and its configuration beside them."""
    from scalerun.cli.weight_export import torchscale_file

    output = Path(cfg.output)
    fields_file = output.with_suffix(".json")
    for path in (output, fields_file):
        prepare_new_file("--output", path, force=cfg.force)
    written = torchscale_file(cfg.path, output, fields_file, part=cfg.part, user_dir=cfg.user_dir)
    report_file(output, *written)
    return 0


def report_file(path: Path, num_tensors: int, num_bytes: int) -> None:
    """Say what was written."""
    logger.info("%s: %d tensors, %s bytes", path, num_tensors, f"{num_bytes:,}")


VERBS: dict[str, tuple[type[Any], Callable[[Any, list[str]], int], str]] = {
    "inspect": (InspectConfig, inspect, "what a checkpoint holds"),
    "verify": (CheckpointVerbConfig, verify, "whether checkpoints are what was written"),
    "consolidate": (ConsolidateConfig, consolidate, f"the weights as one {SUFFIX} file"),
    "average": (AverageConfig, average, "the mean of several checkpoints' weights, as a run"),
    "convert": (ConvertConfig, convert, "the weights for another library"),
}
"""Verb -> its settings, what does it, and a word on it."""


def cli_main() -> None:
    """Entry point of ``scalerun-checkpoint``."""
    run_cli(main)


if __name__ == "__main__":
    cli_main()
