"""Which sequences each batch of each update holds: arithmetic on positions, no data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from scalerun.data.base_dataset import BaseDataset
from scalerun.dataclass.errors import UserError


@dataclass(frozen=True)
class Position:
    """A place in the order of sequences."""

    epoch: int = 1
    shard: int = 0
    samples_in_shard: int = 0
    """Sequences of the shard that were used."""
    samples: int = 0
    """Sequences of the epoch that were used."""

    def to_dict(self) -> dict[str, int]:
        """Plain integers."""
        return asdict(self)


@dataclass(frozen=True)
class Segment:
    """Neighbouring sequences of one shard."""

    epoch: int
    shard: int
    first: int
    count: int


@dataclass(frozen=True)
class BatchPlan:
    """The sequences of one batch of this rank."""

    segments: tuple[Segment, ...]
    first_id: int
    """Index of the first sequence in its epoch; the others follow."""
    epoch: int
    ends_update: bool
    ends_epoch: bool
    after: Position
    """Where the next update starts."""


@dataclass(frozen=True)
class Cut:
    """How updates are cut from the order of sequences.

    An update takes ``batch_size * update_freq * data_size`` sequences of the global order, the last
    of an epoch what is left. Batch j of rank r holds the sequences from
    ``(j * data_size + r) * batch_size`` of the update.
    """

    batch_size: int
    update_freq: Callable[[int], int]
    """Batches per update on each rank, by epoch (from 1)."""
    data_rank: int = 0
    data_size: int = 1

    def samples_per_update(self, epoch: int) -> int:
        """Sequences in a whole update, over all ranks."""
        return self.batch_size * self.update_freq(epoch) * self.data_size


def plan_updates(
    dataset: BaseDataset[Any], start: Position, cut: Cut, *, max_epoch: int = 0
) -> Iterator[list[BatchPlan]]:
    """The batches of this rank for one update after the other, until ``max_epoch`` (0: forever).

    Raises:
        UserError: the data is empty.
    """
    position = start
    while not max_epoch or position.epoch <= max_epoch:
        segments, after = _take(dataset, position, cut.samples_per_update(position.epoch))
        if not segments:
            raise UserError(f"{dataset.place} has no documents; check the text files")
        yield _batches(segments, position, after, cut)
        position = after


def _take(
    dataset: BaseDataset[Any], position: Position, wanted: int
) -> tuple[list[Segment], Position]:
    """The next sequences of an epoch, and the place behind them.

    A place at the end of a shard is the start of the next one that has any sequences.
    """
    segments: list[Segment] = []
    shard, offset, taken = position.shard, position.samples_in_shard, 0
    while shard < dataset.num_shards():
        size = len(dataset.shard(position.epoch, shard))
        if dataset.num_shards() > 1:
            dataset.prefetch((shard + 1) % dataset.num_shards())
        count = min(size - offset, wanted - taken)
        if count > 0:
            segments.append(Segment(position.epoch, shard, offset, count))
            offset, taken = offset + count, taken + count
        if offset < size:
            return segments, Position(position.epoch, shard, offset, position.samples + taken)
        shard, offset = shard + 1, 0
    return segments, Position(position.epoch + 1)


def _batches(
    segments: list[Segment], before: Position, after: Position, cut: Cut
) -> list[BatchPlan]:
    total = sum(segment.count for segment in segments)
    count = -(-total // (cut.batch_size * cut.data_size))
    plans = []
    for j in range(count):
        first = (j * cut.data_size + cut.data_rank) * cut.batch_size
        plans.append(
            BatchPlan(
                segments=tuple(_part(segments, first, first + cut.batch_size)),
                first_id=before.samples + first,
                epoch=before.epoch,
                ends_update=j == count - 1,
                ends_epoch=after.epoch > before.epoch,
                after=after,
            )
        )
    return plans


def _part(segments: list[Segment], start: int, end: int) -> Iterator[Segment]:
    """The sequences ``start..end-1`` of those that the segments list."""
    at = 0
    for segment in segments:
        low, high = max(start - at, 0), min(end - at, segment.count)
        if low < high:
            yield Segment(segment.epoch, segment.shard, segment.first + low, high - low)
        at += segment.count
