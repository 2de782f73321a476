"""Conversation: turns of a chat, in the form of the examples that a model was fine-tuned on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from scalerun.data.text.example import SOURCE_KEY, TARGET_KEY, Example
from scalerun.dataclass.errors import UserError


@dataclass(frozen=True)
class Turn:
    """What a person said, and the answer."""

    said: str
    answer: str
    source: str
    """What the model read: the turns before it that were kept, and what was said."""


@dataclass
class Conversation:
    """The turns of a chat.

    What the model reads of n turns and the next thing said is the source of one training example:
    the texts of the n turns, each as an example of a source and a target has it, and what is said
    now, with the separator between them.
    """

    separator: str = "\n"
    turns: list[Turn] = field(default_factory=list)

    def source(
        self, said: str, *, fits: Callable[[str], bool], at_most: int | None = None
    ) -> tuple[str, int]:
        """What the model is to read, and how many of the oldest turns did not fit into it.

        Args:
            fits: whether a source has room in the context. What is said now is never left out.
            at_most: earlier turns to read; None for all.
        """
        read = self.turns if at_most is None else self.turns[max(len(self.turns) - at_most, 0) :]
        texts = [str(Example(turn.said, turn.answer)) or turn.said for turn in read]
        for dropped in range(len(texts)):
            source = self.separator.join([*texts[dropped:], said])
            if fits(source):
                return source, dropped
        return said, len(texts)

    def add(self, said: str, answer: str, source: str) -> None:
        """Remember a turn."""
        self.turns.append(Turn(said, answer, source))

    def undo(self) -> Turn:
        """Forget the last turn, and return it.

        Raises:
            UserError: there is none.
        """
        if not self.turns:
            raise UserError("nothing has been said yet")
        return self.turns.pop()

    def save(self, path: Path) -> None:
        """Write the turns as JSON lines of examples, which fine-tuning reads.

        Raises:
            UserError: there is none, or the file is there or cannot be written.
        """
        if not self.turns:
            raise UserError("nothing has been said yet, so there is nothing to save")
        lines = [
            json.dumps({SOURCE_KEY: turn.source, TARGET_KEY: turn.answer}, ensure_ascii=False)
            for turn in self.turns
        ]
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
        except FileExistsError as error:
            raise UserError(f"/save {path}: the file exists; name another") from error
        except OSError as error:
            raise UserError(f"/save {path}: {error.strerror}") from error
