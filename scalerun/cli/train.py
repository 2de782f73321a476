"""Train a model: ``python -m scalerun.cli.train DATA --task … --arch …``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from scalerun.cli.entry import run_cli
from scalerun.cli.launch import on_every_rank
from scalerun.cli.registries import CHOOSERS
from scalerun.cli.run_folder import RunFolder
from scalerun.dataclass.configs import ScalerunConfig
from scalerun.dataclass.parser import parse_config
from scalerun.distributed.ranks import Ranks
from scalerun.distributed.stop_signal import StopSignal
from scalerun.logging.console import setup_logging
from scalerun.plugins import load_plugins


def main(argv: Sequence[str] | None = None) -> int:
    """Train until the run ends or a signal stops it; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    cfg = parse_config(
        ScalerunConfig, words, prog="scalerun-train", choosers=CHOOSERS, load_plugins=load_plugins
    )
    return on_every_rank(
        cfg.distributed,
        lambda ranks: train(cfg, words, ranks),
        cpu=cfg.common.cpu,
        settings=cfg.to_dict(),
    )


def train(cfg: ScalerunConfig, words: list[str], ranks: Ranks) -> int:
    """One rank's part of the run."""
    # Only now, so that --help and a mistyped flag need not wait for torch's distributed packages.
    from scalerun.cli.assembly import build_parts, refuse_other_data
    from scalerun.trainer import Trainer

    setup_logging(
        cfg.common.log_format,
        log_file=cfg.common.log_file,
        rank=ranks.rank,
        world_size=ranks.size,
    )
    with (
        StopSignal(announce=ranks.is_main) as stop_signal,
        RunFolder(Path(cfg.checkpoint.save_dir), ranks.control) as folder,
    ):
        parts = ranks.control.together(lambda: build_parts(cfg, folder.path, ranks))
        with parts.sinks, parts.checkpoints:
            refuse_other_data(parts)
            trainer = Trainer(cfg, parts, stop_signal)
            trainer.resume()
            # Not before: a command that is refused must not describe the run that is there.
            folder.write_description(cfg, words)
            trainer.train()
    return stop_signal.exit_code


def cli_main() -> None:
    """Entry point of ``scalerun-train``."""
    run_cli(main)


if __name__ == "__main__":
    cli_main()
