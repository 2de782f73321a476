"""What one forward pass sees."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""Target of a position that is not predicted (torch's own convention)."""


@dataclass(frozen=True)
class Batch:
    """Sequences of equal length (B sequences, T tokens; M tokens of their sources).

    ``targets[b, t]`` is the token that follows ``tokens[b, t]``. The document of a position is the
    document of its *target*: the separator before a document already belongs to that document.
    """

    tokens: Tensor
    """(B, T) int64, the inputs."""
    targets: Tensor
    """(B, T) int64, :data:`IGNORE_INDEX` where nothing is predicted."""
    num_targets: int
    """Positions that are predicted; counted where the batch is made, so that no device waits."""
    sample_ids: list[int]
    """Index of each sequence in its epoch."""
    positions: Tensor | None = None
    """(B, T) int64 from 0, when positions restart at each document; None counts from 0."""
    document_ids: Tensor | None = None
    """(B, T) int64, when attention must stay inside a document; None does not restrict it."""
    source: Tensor | None = None
    """(B, M) int64, what an encoder reads; None for models without one."""

    @property
    def num_samples(self) -> int:
        """Sequences, B."""
        return self.tokens.shape[0]

    def net_input(self) -> dict[str, Tensor | None]:
        """Keyword arguments for the model."""
        if self.source is not None:
            return {"source_BM": self.source, "tokens_BT": self.tokens}
        return {
            "tokens_BT": self.tokens,
            "positions_BT": self.positions,
            "document_ids_BT": self.document_ids,
        }

    def part(self, index: int, length: int) -> Self:
        """Part ``index`` (from 0) of all sequences, cut every ``length`` tokens.

        What is past the end has no targets. No earlier token may see it. Each part has the whole
        source.
        """

        def cut(x: Tensor, filler: int) -> Tensor:
            part = x[:, index * length : (index + 1) * length]
            return F.pad(part, (0, length - part.shape[1]), value=filler)

        targets = cut(self.targets, IGNORE_INDEX)
        return replace(
            self,
            tokens=cut(self.tokens, 0),
            targets=targets,
            num_targets=int((targets != IGNORE_INDEX).sum()),
            positions=None if self.positions is None else cut(self.positions, 0),
            document_ids=None if self.document_ids is None else cut(self.document_ids, -1),
        )

    def to(self, device: torch.device) -> Self:
        """The same batch with its tensors on ``device``."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)
