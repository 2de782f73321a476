"""Convert models of other libraries, and for them: ``python -m scalerun.cli.convert``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from scalerun.cli.convert_config import ConvertConfig
from scalerun.cli.entry import run_cli
from scalerun.cli.output_file import refuse_full_folder
from scalerun.dataclass.parser import parse_config
from scalerun.logging.console import setup_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Convert one model; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    cfg = parse_config(ConvertConfig, words, prog="scalerun-convert")
    setup_logging()
    refuse_full_folder("--output", Path(cfg.output))
    return find_format(cfg.direction)(cfg, words)


def find_format(direction: str) -> Callable[[ConvertConfig, list[str]], int]:
    """What does the work of ``--from …`` or ``--to …``.

    The formats import late, so that --help need not wait for torch's distributed packages.
    """
    match direction:
        case "--from torchscale":
            from scalerun.cli.formats.torchscale import from_torchscale

            return from_torchscale
        case "--from hf":
            from scalerun.cli.formats.from_hf import from_hf

            return from_hf
        case "--from metaseq":
            from scalerun.cli.formats.from_metaseq import from_metaseq

            return from_metaseq
        case "--to hf":
            from scalerun.cli.formats.to_hf import to_hf

            return to_hf
    raise AssertionError(direction)


def cli_main() -> None:
    """Entry point of ``scalerun-convert``."""
    run_cli(main)


if __name__ == "__main__":
    cli_main()
