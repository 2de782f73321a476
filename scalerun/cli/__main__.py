"""All commands by one name: ``python -m scalerun.cli train DATA …``."""

from __future__ import annotations

import difflib
import sys
from importlib.metadata import EntryPoint, entry_points

from scalerun import __version__

PREFIX = "scalerun-"
"""Of the console scripts; what follows is the name of a command."""


def commands() -> dict[str, EntryPoint]:
    """The installed commands: ``train`` for ``scalerun-train``, and so on."""
    scripts = entry_points(group="console_scripts")
    found = {script.name: script for script in scripts if script.name.startswith(PREFIX)}
    return {name.removeprefix(PREFIX): found[name] for name in sorted(found)}


def main() -> None:
    """Become the command that the first word names.

    Raises:
        SystemExit: with 2 where it names none.
    """
    known = commands()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("--help", "-h"):
        print(usage(known))
    elif name == "--version":
        print(f"scalerun {__version__}")
    elif name in known:
        sys.argv = [PREFIX + name, *sys.argv[2:]]
        known[name].load()()
    else:
        print(f"error: {refusal(name, known)}", file=sys.stderr)
        sys.exit(2)


def usage(known: dict[str, EntryPoint]) -> str:
    """What ``--help`` prints."""
    return (
        "usage: python -m scalerun.cli COMMAND ...\n\n"
        f"commands: {', '.join(known)}\n"
        "COMMAND --help lists the flags of a command."
    )


def refusal(name: str, known: dict[str, EntryPoint]) -> str:
    """Why nothing was done."""
    if not known:
        return "scalerun is not installed in this Python, so no commands are known; pip install it"
    said = f"{name!r} is no command" if name else "COMMAND is missing"
    close = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{said}{hint}; there are {', '.join(known)}"


if __name__ == "__main__":
    main()
