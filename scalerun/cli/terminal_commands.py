"""What a person types between prompts: lines that begin with a slash."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from scalerun.dataclass.errors import UserError


@dataclass(frozen=True)
class Command:
    """A command of the terminal."""

    arguments: str
    """What follows its name, for the help; empty if nothing does."""
    help: str
    """What it does, in a line."""
    run: Callable[[str], str | None]
    """Does it, given the rest of the line; returns what to say of it, if anything.

    Raises UserError where it cannot be done, and EOFError to end.
    """


def with_help(commands: Mapping[str, Command]) -> dict[str, Command]:
    """The same with ``/help``, which lists them, and ``/quit``."""

    def end(rest: str) -> NoReturn:
        raise EOFError

    def listed(rest: str) -> str:
        usages = {f"{name} {each.arguments}".rstrip(): each.help for name, each in every.items()}
        width = max(map(len, usages))
        return "\n".join(f"{usage:{width}}  {text}" for usage, text in usages.items())

    every = {
        "/help": Command("", "show these lines", listed),
        **commands,
        "/quit": Command("", "end; so does Ctrl-D", end),
    }
    return every


def run_command(commands: Mapping[str, Command], line: str) -> str | None:
    """Do what a line says that begins with a slash.

    Raises:
        UserError: there is no such command, or it cannot be done; one sentence.
        EOFError: it ends the conversation.
    """
    name, _, rest = line.strip().partition(" ")
    command = commands.get(name)
    if command is None:
        close = difflib.get_close_matches(name, commands, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise UserError(
            f"{name} is not a command; {meant}type /help for the commands, or // to begin a prompt "
            "with a slash"
        )
    if rest.strip() and not command.arguments:
        raise UserError(f"{name} takes nothing behind it, and {rest.strip()!r} was given")
    return command.run(rest.strip())
