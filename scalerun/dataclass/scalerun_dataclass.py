"""The base of every configuration: fields are flags, and a finished configuration is read-only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from scalerun.dataclass.errors import ConfigError


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    aliases: Sequence[str] = (),
    positional: bool = False,
) -> Any:
    """Declare one setting: its default, and what ``--help`` says of it.

    Args:
        default: the value when nobody sets it; a list or dict is copied for each instance.
        help: one line without a full stop; name units (tokens, updates, seconds, bytes).
        choices: the only strings allowed.
        aliases: further spellings of the flag, such as ``--max-sentences``.
        positional: the setting is a positional argument, not a flag.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices) if choices is not None else None,
        "aliases": tuple(aliases),
        "positional": positional,
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def component(flag: str, help: str, *, default: str | None = None) -> Any:
    """Declare a slot that a registered component's own configuration fills.

    Args:
        flag: the flag that chooses the component, such as ``--optimizer``.
        help: one line for ``--help``.
        default: the component when nobody chooses one; None makes the flag required.
    """
    metadata = {"component": flag, "help": help, "default_component": default}
    return dataclasses.field(default=None, metadata=metadata)


class ScalerunDataclass:
    """A group of settings. Subclasses are dataclasses whose fields are made by :func:`option`.

    ``_name`` is the registered name under which the component was chosen (None for plain sections).
    """

    free_settings: ClassVar[frozenset[str]] = frozenset()
    """Settings of a model that may change when a run goes on: they do not change its function."""

    implied: ClassVar[Mapping[str, str]] = {}
    """What another component has to be beside this one: its slot, and the only name that will do.
    It is chosen where nobody chooses one."""

    _name: str | None = None
    _read_only: bool = False

    def validate(self) -> None:
        """Check this group alone.

        Raises:
            ConfigError: a value is out of range or two settings contradict each other.
        """

    def warnings(self) -> list[str]:
        """What is allowed and seldom meant, a sentence for each; logged when a run starts."""
        return []

    def named(self, name: str) -> Self:
        """Return self, remembering the registered name it was chosen by."""
        object.__setattr__(self, "_name", name)
        return self

    def freeze(self) -> Self:
        """Make this group and all groups inside it read-only; return self."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, ScalerunDataclass):
                value.freeze()
        object.__setattr__(self, "_read_only", True)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if self._read_only:
            raise AttributeError(f"{type(self).__name__}.{name} is read-only after parsing")
        object.__setattr__(self, name, value)

    def replace(self, **changes: Any) -> Self:
        """Return an unfrozen copy with some settings changed; nested groups are shared.

        Raises:
            ConfigError: a name is not a setting of this group.
        """
        known = {field.name for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        for name in changes:
            if name not in known:
                raise ConfigError(f"{type(self).__name__} has no setting {name!r}")
        copy = dataclasses.replace(self, **changes)  # type: ignore[type-var]
        object.__setattr__(copy, "_name", self._name)
        return copy

    def resolved(self) -> Self:
        """A copy in which what is left open, or has two spellings, is filled in.

        Configurations of equal functions should be equal when they are resolved.
        """
        return self.replace()

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, nested like the groups; a component's name is ``_name``."""
        result: dict[str, Any] = {} if self._name is None else {"_name": self._name}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, ScalerunDataclass):
                value = value.to_dict()
            elif isinstance(value, list | dict):
                value = value.copy()
            result[field.name] = value
        return result
