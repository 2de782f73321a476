"""BaseScorer: what a validation set gives besides its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod

from scalerun.data.batch import Batch


class BaseScorer(ABC):
    """Sees every batch of a validation pass on every rank, in evaluation mode."""

    @abstractmethod
    def add(self, batch: Batch) -> None:
        """Take a batch into account; it is on the model's device. Every rank calls it as often."""

    @abstractmethod
    def scores(self) -> dict[str, float]:
        """The numbers of all batches of all ranks, by their names in ``metrics.jsonl``."""
