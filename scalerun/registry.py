"""Names for components: a class and the configuration class that describes it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass

T = TypeVar("T")
C = TypeVar("C", bound=type)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that nobody registered: closest matches first, then all choices."""
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return ConfigError(f"{kind} {name!r} is not known{hint} (choices: {', '.join(choices)})")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered component."""

    name: str
    cls: type[T]
    config_class: type[ScalerunDataclass]


class Registry(Generic[T]):
    """Maps a name to (class, configuration class).

    Args:
        flag: the flag whose values are the names, such as ``--optimizer``; used in messages.
        base: every registered class must derive from it.
    """

    def __init__(self, flag: str, base: type[T]) -> None:
        self.flag = flag
        self.base = base
        self._entries: dict[str, Entry[T]] = {}

    def register(self, name: str, config_class: type[ScalerunDataclass]) -> Callable[[C], C]:
        """Class decorator that adds a component.

        Raises:
            ValueError: the name or the configuration class is taken.
            TypeError: the class or the configuration class has the wrong base, or the class lacks
                methods that its base asks for.
        """

        def add(cls: C) -> C:
            if name in self._entries:
                owner = self._entries[name].cls
                raise ValueError(
                    f"{self.flag} {name!r} is already {owner.__module__}.{owner.__qualname__}"
                )
            if not issubclass(cls, self.base):
                raise TypeError(f"{cls.__qualname__} must derive from {self.base.__qualname__}")
            missing = sorted(getattr(cls, "__abstractmethods__", ()))
            if missing:
                raise TypeError(f"{cls.__qualname__} does not define {', '.join(missing)}")
            if not issubclass(config_class, ScalerunDataclass):
                raise TypeError(f"{config_class.__qualname__} must derive from ScalerunDataclass")
            for entry in self._entries.values():
                if entry.config_class is config_class:
                    raise ValueError(
                        f"{config_class.__qualname__} already configures {self.flag} {entry.name}"
                    )
            self._entries[name] = Entry(name, cls, config_class)
            return cls  # type: ignore[return-value]

        return add

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._entries)

    def kinds(self) -> list[str]:
        """All registered names, sorted: each has settings of its own."""
        return self.names()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def get(self, name: str) -> Entry[T]:
        """Look a name up.

        Raises:
            ConfigError: nobody registered it; the message lists the closest names and all choices.
        """
        if name not in self._entries:
            raise unknown_name(self.flag, name, self._entries)
        return self._entries[name]

    def config_for(self, name: str) -> ScalerunDataclass:
        """A fresh configuration of the named component, with its defaults."""
        return self.get(name).config_class().named(name)

    def class_for(self, cfg: ScalerunDataclass) -> type[T]:
        """The component that a configuration describes: found by the configuration's type."""
        for config_class in type(cfg).__mro__:
            for entry in self._entries.values():
                if entry.config_class is config_class:
                    return entry.cls
        raise unknown_name(self.flag, type(cfg).__qualname__, self._entries)
