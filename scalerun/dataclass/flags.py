"""Flags: one for each setting of a configuration tree."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.literals import SettingType
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass


@dataclass(frozen=True)
class Flag:
    """One setting as the command line sees it."""

    group: ScalerunDataclass
    owner: str
    """Whose setting it is, for messages and ``--help``: ``optimization``, ``--optimizer adam``."""
    field: str
    type: SettingType
    help: str
    choices: tuple[str, ...] | None
    aliases: tuple[str, ...]
    positional: bool

    @property
    def name(self) -> str:
        """``--batch-size``, or ``DATA`` for a positional.

        A word that Python keeps for itself has ``_`` at its end: ``from_`` is ``--from``.
        """
        if self.positional:
            return self.field.upper()
        return "--" + self.field.rstrip("_").replace("_", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every spelling that gives the setting a value."""
        return () if self.positional else (self.name, *self.aliases)

    @property
    def is_switch(self) -> bool:
        """Whether the flag needs no value: ``--x`` and ``--no-x``."""
        return self.type.scalar is bool and self.type.container is None

    @property
    def negations(self) -> tuple[str, ...]:
        """Spellings that switch it off; ``--no-x`` has none, since nobody says ``--no-no-x``."""
        if not self.is_switch:
            return ()
        return tuple(
            "--no-" + spelling.removeprefix("--")
            for spelling in self.spellings
            if not spelling.startswith("--no-")
        )

    def set(self, text: str, *, append: bool = False) -> None:
        """Give the setting a value.

        Args:
            append: add to the list or dict that is there, since the flag was repeated; an empty
                list takes its place.

        Raises:
            ConfigError: the text is not of the setting's type or not one of its choices.
        """
        try:
            value: Any = self.type.parse(text)
        except ValueError as error:
            raise ConfigError(f"{self.name}: {error}") from error
        if append and value and isinstance(value, list):
            value = getattr(self.group, self.field) + value
        elif append and isinstance(value, dict):
            value = getattr(self.group, self.field) | value
        setattr(self.group, self.field, value)

    def add(self, word: str) -> None:
        """Take one more word of a positional that takes all of them; commas do not part it.

        Raises:
            ConfigError: the word is not of the setting's type.
        """
        one = dataclasses.replace(self, type=SettingType(self.type.scalar))
        before = getattr(self.group, self.field)
        one.set(word)
        setattr(self.group, self.field, [*before, getattr(self.group, self.field)])

    def check(self) -> None:
        """Refuse a value of another type or outside the choices, and numbers that are not finite.

        Raises:
            ConfigError: names the flag.
        """
        value = getattr(self.group, self.field)
        if not self.type.accepts(value):
            raise ConfigError(f"{self.name}: {value!r} is not {self.type.words}")
        if self.choices is not None and value is not None and value not in self.choices:
            close = difflib.get_close_matches(str(value), self.choices, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"{self.name}: {value!r} is not a choice{hint} (choices: {', '.join(self.choices)})"
            )
        values = value.values() if isinstance(value, dict) else value
        for number in values if isinstance(value, list | dict) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{self.name}: {number} is not a finite number")


def flags_of(group: ScalerunDataclass, owner: str) -> Iterator[Flag]:
    """The flags of one group's own settings."""
    annotations = typing.get_type_hints(type(group))
    for field in dataclasses.fields(group):  # type: ignore[arg-type]
        if "aliases" in field.metadata:
            yield Flag(
                group=group,
                owner=owner,
                field=field.name,
                type=SettingType.of(annotations[field.name]),
                help=field.metadata["help"],
                choices=field.metadata["choices"],
                aliases=field.metadata["aliases"],
                positional=field.metadata["positional"],
            )


def check_settings(group: ScalerunDataclass) -> None:
    """Refuse settings that a command line would refuse, whoever set them.

    Raises:
        ConfigError: names the flag.
    """
    for flag in flags_of(group, type(group).__qualname__):
        flag.check()
    group.validate()


class FlagTable:
    """Every spelling on a command line -> its flag.

    Raises:
        ConfigError: two groups share a spelling; names both owners.
    """

    def __init__(self, flags: Iterable[Flag]) -> None:
        self.flags = list(flags)
        self.positionals = [flag for flag in self.flags if flag.positional]
        self.by_spelling: dict[str, tuple[Flag, bool]] = {}
        for flag in self.flags:
            for spelling in flag.spellings:
                self._add(spelling, flag, True)
            for spelling in flag.negations:
                self._add(spelling, flag, False)

    def _add(self, spelling: str, flag: Flag, on: bool) -> None:
        if spelling in self.by_spelling:
            other = self.by_spelling[spelling][0]
            raise ConfigError(
                f"{spelling} belongs to both {other.owner} and {flag.owner}; choose others"
            )
        self.by_spelling[spelling] = (flag, on)
