"""``--help``: every flag of the chosen components, with types and defaults."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scalerun.dataclass.flags import Flag, flags_of
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass


def format_help(
    prog: str,
    groups: Iterable[tuple[str, ScalerunDataclass]],
    special: Mapping[str, str],
    *,
    unchosen: Sequence[str] = (),
) -> str:
    """The text of ``--help``.

    Args:
        groups: (owner, settings); an owner's flags stand together.
        special: flags that are not settings, with their help.
        unchosen: flags that choose a component and were not given, so that its flags are missing.
    """
    parser = argparse.ArgumentParser(prog=prog, add_help=False, usage=f"{prog} [DATA] [flags]")
    first = parser.add_argument_group("general")
    for name, text in special.items():
        action: Any = "store_true" if name in ("--help", "--version", "--print-config") else "store"
        first.add_argument(name, help=_plain(text), action=action, **_metavar(action, "NAME"))
    positionals: list[str] = []
    for owner, group in groups:
        flags = list(flags_of(group, owner))
        if not flags:
            continue
        section = parser.add_argument_group(owner)
        for flag in flags:
            positionals += [f"[{flag.name}]"] if flag.positional else []
            _add(section, flag)
    if unchosen:
        parser.epilog = f"Together with {' and '.join(unchosen)}, --help lists their flags too."
    else:
        parser.usage = " ".join((prog, *positionals, "[flags]"))
    return parser.format_help()


def _metavar(action: str, name: str) -> dict[str, Any]:
    return {"metavar": name} if action == "store" else {}


def _add(section: Any, flag: Flag) -> None:
    value = getattr(flag.group, flag.field)
    text = flag.help
    if flag.choices is not None:
        text += f" (choices: {', '.join(flag.choices)})"
    # A help text that explains its default knows better.
    if value is not None and value not in ([], {}, "") and "(default:" not in text:
        text += f" (default: {_shown(value)})"
    if flag.positional:
        section.add_argument(flag.field, help=_plain(text), metavar=flag.name, nargs="?")
    elif flag.is_switch:
        names = (*flag.spellings, *flag.negations[:1])
        section.add_argument(*names, help=_plain(text), action="store_true")
    else:
        section.add_argument(*flag.spellings, help=_plain(text), metavar=flag.type.metavar)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(text: str) -> str:
    """argparse expands % in help texts."""
    return text.replace("%", "%%")
