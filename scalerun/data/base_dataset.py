"""BaseDataset: what the loader asks of a dataset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from scalerun.data.batch import Batch

Sample = TypeVar("Sample")


@dataclass(frozen=True)
class DatasetCounts:
    """What the shards of a dataset hold that have been read so far."""

    documents: int
    tokens: int
    """Target tokens of one pass."""
    num_bytes: int
    """UTF-8 bytes of the text that the targets spell; 0 when the data has no text."""

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes that a target token stands for; None where there is no text."""
        return self.num_bytes / self.tokens if self.tokens and self.num_bytes else None


class BaseDataset(ABC, Generic[Sample]):
    """An ordered collection of samples for each epoch, cut into shards that are read in turn.

    The order of the samples of an epoch is a pure function of (seed, epoch, fingerprint, block
    settings): it knows neither ranks nor workers nor batch sizes.
    """

    whole_batches: ClassVar[bool] = False
    """Whether each sample is a batch by itself, of as many sequences as fit."""

    @property
    def name(self) -> str:
        """What messages call the data."""
        return "the data"

    @property
    def place(self) -> str:
        """The name with the folder of the data, for messages about what is in its files."""
        return self.name

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hex digest of the data and of all settings that decide which samples there are."""

    @property
    def ingredients(self) -> dict[str, str]:
        """What the fingerprint is made of, for people: flags and their values, names and digests.

        A message about another fingerprint names those that differ.
        """
        return {}

    @abstractmethod
    def num_shards(self) -> int:
        """Shards in an epoch."""

    @abstractmethod
    def shard(self, epoch: int, index: int) -> Sequence[Sample]:
        """The samples of one shard in the order of this epoch (from 1); waits until it is read.

        Raises:
            UserError: the data cannot be read.
        """

    def prefetch(self, index: int) -> None:
        """Start to read a shard in the background, if that takes time."""

    @abstractmethod
    def collate(self, samples: Sequence[Sample], sample_ids: Sequence[int]) -> Batch:
        """Make a batch; of no samples, one with a row of padding and no targets."""

    @abstractmethod
    def counts(self) -> DatasetCounts:
        """Totals of the shards that have been read so far; after a whole pass, of all."""

    def num_samples(self) -> int | None:
        """Samples in an epoch, or None while that is not known."""
        return None
