"""Settings: what a person may change between two prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Generic, TypeVar

from scalerun.cli.sampling_config import SamplingConfig
from scalerun.cli.shared_inference import SharedInferenceConfig
from scalerun.cli.terminal_commands import Command
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.parser import parse_config

FIXED = {field.name for field in fields(SharedInferenceConfig)} | {"json"}
"""What was decided when the model was loaded."""


C = TypeVar("C", bound=SamplingConfig)


class Settings(Generic[C]):
    """The settings of a command, as its flags gave them and ``/set`` changes them.

    Args:
        kind: the command's settings.
        words: the command line.
        prog: the command's name.
    """

    def __init__(self, kind: type[C], words: Sequence[str] | None, prog: str) -> None:
        self.kind = kind
        self.prog = prog
        self._given = list(sys.argv[1:] if words is None else words)
        self._words = self._given
        self.cfg: C = parse_config(kind, self._given, prog=prog)

    def names(self) -> list[str]:
        """What can be changed, as flags are spelled."""
        return [
            field.name.replace("_", "-")
            for field in fields(self.kind)
            if field.name not in FIXED and not field.name.startswith("_")
        ]

    def set(self, text: str) -> str:
        """Change a setting: ``temperature 0.7``; return what it is now.

        Raises:
            ConfigError: no such setting, or not such a value; everything stays as it was.
        """
        name, _, value = text.strip().partition(" ")
        name = name.lstrip("-").replace("_", "-")
        if name not in self.names():
            raise ConfigError(
                f"/set {name or 'without a name'} is not known; the settings are "
                f"{', '.join(self.names())}"
            )
        if not value.strip():
            raise ConfigError(f"/set {name} has no value; type /set {name} VALUE")
        words = [*self._words, f"--{name}={value.strip()}"]
        if isinstance(self._value(name), list):
            words.insert(-1, f"--{name}=[]")  # or else the flag would add to them
        self.cfg = parse_config(self.kind, words, prog=self.prog)
        self._words = words
        return self._line(name)

    def show(self) -> str:
        """All that can be changed, a line each."""
        return "\n".join(map(self._line, self.names()))

    def summary(self) -> str:
        """What is not as it is by default, in a line."""
        default = self.kind()
        changed = [
            self._line(name)
            for name in self.names()
            if self._value(name) != getattr(default, name.replace("-", "_"))
        ]
        return "  ".join(changed)

    def commands(self) -> dict[str, Command]:
        """What a person can type to see and change them."""
        return {
            "/set": Command("NAME VALUE", "change a setting", self.set),
            "/settings": Command("", "show the settings", lambda rest: self.show()),
            "/defaults": Command("", "go back to the settings of the command line", self._reset),
        }

    def _reset(self, rest: str) -> str:
        self._words = self._given
        self.cfg = parse_config(self.kind, self._words, prog=self.prog)
        return self.show()

    def _value(self, name: str) -> object:
        return getattr(self.cfg, name.replace("-", "_"))

    def _line(self, name: str) -> str:
        value = self._value(name)
        if isinstance(value, list):
            value = " ".join(map(repr, value))
        return f"{name} {'-' if value is None or value == '' else value}"
