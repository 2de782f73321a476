"""Tables of names that are read in both directions."""

from __future__ import annotations

import re
from collections.abc import Sequence

FIELDS = {
    "layer": r"\d+",
    "half": r"(?:\.[AB])?",
    "kind": r"weight|bias",
    "qkvo": r"[qkv]|out",
    "qkvgo": r"[qkvg]|out",
    "fc": r"fc1|fc2",
    "fcg": r"fc1|fc2|gate",
}
"""What may stand for each field of a name. ``half`` is that of a multiway layer, if it is one."""


class Renames:
    """Names of another library and of scalerun for the same tensors.

    Args:
        pairs: (theirs, ours); fields of :data:`FIELDS` stand in braces, the same ones on both
            sides. Where several pairs fit, the first counts.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self.pairs = pairs
        self._ours = [(_pattern(theirs), ours) for theirs, ours in pairs]
        self._theirs = [(_pattern(ours), theirs) for theirs, ours in pairs]

    def ours(self, key: str) -> str | None:
        """Our name for a key of theirs; None if the table does not have it."""
        return _renamed(key, self._ours)

    def theirs(self, name: str) -> str | None:
        """Their key for our name; None if the table does not have it."""
        return _renamed(name, self._theirs)


def _pattern(name: str) -> re.Pattern[str]:
    """``layers.{layer}.x`` -> a pattern with a group for each field."""
    parts = re.split(r"\{(\w+)\}", name)
    return re.compile(
        "".join(
            f"(?P<{part}>{FIELDS[part]})" if i % 2 else re.escape(part)
            for i, part in enumerate(parts)
        )
    )


def _renamed(name: str, table: Sequence[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, template in table:
        match = pattern.fullmatch(name)
        if match:
            return template.format(**match.groupdict())
    return None
