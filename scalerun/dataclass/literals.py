"""Text on a command line -> the value of a typed setting. Literals only; nothing is evaluated."""

from __future__ import annotations

import math
import re
import types
import typing
from dataclasses import dataclass
from typing import Any

_LARGEST = 2**63 - 1
_WHOLE = re.compile(r"[+-]?\d+(_\d+)*")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_ITEM = re.compile(rf"(?:^|(?<=,))(?:\s*(?:{_QUOTED.pattern})\s*(?=,|$)|[^,]*)")
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_BRACKETS = {"[": "]", "(": ")"}
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_PLURALS = {bool: "true or false", int: "whole numbers", float: "numbers", str: "texts"}


@dataclass(frozen=True)
class SettingType:
    """The type of one setting: a scalar, a list of scalars, or a dict from names to scalars."""

    scalar: type
    container: type | None = None
    optional: bool = False

    @classmethod
    def of(cls, annotation: Any) -> SettingType:
        """Understand a field's annotation.

        Raises:
            TypeError: the annotation is none of the supported forms.
        """
        optional = False
        if typing.get_origin(annotation) in (types.UnionType, typing.Union):
            rest = [a for a in typing.get_args(annotation) if a is not type(None)]
            if len(rest) != 1:
                raise TypeError(f"a setting cannot be {annotation}")
            annotation, optional = rest[0], True
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        container: type | None = None
        if origin is list:
            scalar, container = args[0], list
        elif origin is dict and args[0] is str:
            scalar, container = args[1], dict
        else:
            scalar = annotation
        if scalar not in _NAMES:
            raise TypeError(f"a setting cannot be {annotation}")
        return cls(scalar, container, optional)

    @property
    def metavar(self) -> str:
        """The placeholder shown in ``--help``."""
        name = {bool: "BOOL", int: "N", float: "X", str: "TEXT"}[self.scalar]
        if self.container is list:
            return f"{name},..."
        return f"NAME={name},..." if self.container is dict else name

    @property
    def words(self) -> str:
        """What a value has to be, as in "is not a whole number"."""
        if self.container is list:
            return f"a list of {_PLURALS[self.scalar]}"
        if self.container is dict:
            return f"a dict of {_PLURALS[self.scalar]} by name"
        return _NAMES[self.scalar]

    def accepts(self, value: Any) -> bool:
        """Whether a value is of this type; a whole number is also a number, but true is none."""
        if value is None:
            return self.optional
        if self.container is None:
            return _is_scalar(self.scalar, value)
        if self.container is list:
            return isinstance(value, list) and all(_is_scalar(self.scalar, i) for i in value)
        return isinstance(value, dict) and all(
            type(name) is str and _is_scalar(self.scalar, item) for name, item in value.items()
        )

    def parse(self, text: str) -> Any:
        """Read a value.

        Raises:
            ValueError: the text is not of this type; the message is a sentence's second half, as in
                "'ten' is not a whole number".
        """
        if self.optional and text.strip().lower() in ("none", "null"):
            return None
        if self.container is None:
            return _scalar(self.scalar, text)
        items = _items(text)
        if self.container is list:
            return [_scalar(self.scalar, item) for item in items]
        pairs = [item.partition("=") for item in items]
        for name, equals, _ in pairs:
            if not equals or not name:
                raise ValueError(f"{text!r} is not a list of name=value pairs, as in a=1,b=2")
        if len({name.strip() for name, _, _ in pairs}) < len(pairs):
            raise ValueError(f"{text!r} gives one name twice")
        return {name.strip(): _scalar(self.scalar, value) for name, _, value in pairs}


def _is_scalar(kind: type, value: Any) -> bool:
    return type(value) is kind or (kind is float and type(value) is int)


def _scalar(kind: type, text: str) -> Any:
    text = text if kind is str else text.strip()
    wrong = ValueError(f"{text!r} is not {_NAMES[kind]}")
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise wrong
        return _BOOLEANS[text.lower()]
    if kind is int:
        if not _WHOLE.fullmatch(text):
            raise wrong
        if abs(int(text)) > _LARGEST:
            raise ValueError(f"{text!r} is too large; {_LARGEST} is the largest number allowed")
        return int(text)
    try:
        number = float(text)
    except ValueError:
        raise wrong from None
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a finite number")
    return number


def _items(text: str) -> list[str]:
    """Split a list at its commas; those inside quotes belong to an item.

    Brackets around the list and quotes around an item are taken off. White space counts only inside
    quotes, and where there is nothing else.
    """
    inner = text.strip()
    closing = _BRACKETS.get(inner[:1])
    if closing is not None:
        if not inner.endswith(closing):
            raise ValueError(f"{text!r} opens {inner[0]!r} and does not close it")
        inner = inner[1:-1].strip()
    elif text and not inner:
        return [text]
    if not inner:
        return []
    items = [match.group().strip() for match in _ITEM.finditer(inner.removesuffix(","))]
    if not all(items):
        raise ValueError(f"{text!r} has an empty item")
    return [item[1:-1] if _QUOTED.fullmatch(item) else item for item in items]
