"""Continue prompts from the terminal or from standard input.

On a terminal what is typed is a prompt, and lines that begin with a slash are commands: /help lists
them. From a pipe or file each line is a prompt, in order, until the input ends. An empty line is an
empty prompt: the model begins a document of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from scalerun.cli.entry import run_cli
from scalerun.cli.sampling_config import SamplingConfig
from scalerun.cli.session import LoadedGenerator, Session, answer_pipe, on_every_rank
from scalerun.cli.settings import Settings
from scalerun.cli.terminal import HINT, prompt_reader, talk
from scalerun.cli.terminal_commands import with_help
from scalerun.logging.console import setup_logging

PROG = "scalerun-interactive"


@dataclass
class InteractiveConfig(SamplingConfig):
    """Everything that ``scalerun.cli.interactive_cli`` can be told."""


def main(argv: Sequence[str] | None = None) -> int:
    """Load a checkpoint and answer prompts; 0 at the end of the input."""
    settings = Settings(InteractiveConfig, argv, PROG)
    setup_logging("none")
    return on_every_rank(settings.cfg, lambda loaded: converse(settings, loaded))


def converse(settings: Settings[InteractiveConfig], loaded: LoadedGenerator) -> int:
    """Answer what is typed, or what a pipe holds; return the exit code."""
    session = Session(settings, loaded.generator, autocast=loaded.autocast, out=sys.stdout)
    if not sys.stdin.isatty():
        answer_pipe(session, sys.stdin.buffer)
        return 0
    commands = with_help(settings.commands())
    print(f"{loaded.name}. {HINT}", file=sys.stderr)
    read = prompt_reader(PROG, commands, lambda: f"{loaded.name}  {settings.summary()}")
    return talk(read, commands, session.answer)


def cli_main() -> None:
    """Entry point of the console script."""
    run_cli(main)


if __name__ == "__main__":
    cli_main()
