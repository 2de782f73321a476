"""BatchLoader: batches for one update after the other, resumable at every update."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from scalerun.data.base_dataset import BaseDataset
from scalerun.data.batch import Batch
from scalerun.data.batch_plan import BatchPlan, Cut, Position, plan_updates
from scalerun.data.text.preparation import quiet_fork
from scalerun.dataclass.errors import UserError

PARENT_CHECK_SECONDS = 1.0
"""How often a worker looks whether the main process is still there."""


class BatchLoader:
    """Yields this rank's batches of one update after the other.

    The order of sequences is the dataset's; ranks, workers and batch sizes only cut it. An update
    takes ``batch_size * update_freq(epoch) * data_size`` sequences, the last of an epoch what is
    left, so that every sequence is used once an epoch. Where a sample of the dataset is a whole
    batch, one of them takes the place of ``batch_size`` sequences.

    Args:
        dataset: where the sequences come from.
        batch_size: sequences in a batch.
        update_freq: batches in an update on each rank, by epoch (from 1).
        num_workers: processes that make batches; 0 makes them here when they are asked for.
        buffer_size: batches that each worker makes ahead.
        data_rank: this rank among those that share the data.
        data_size: how many share it.
        max_epoch: last epoch; 0 goes on forever.
    """

    def __init__(
        self,
        dataset: BaseDataset[Any],
        *,
        batch_size: int,
        update_freq: Callable[[int], int],
        num_workers: int,
        buffer_size: int,
        data_rank: int = 0,
        data_size: int = 1,
        max_epoch: int = 0,
    ) -> None:
        self.dataset = dataset
        batch_size = 1 if dataset.whole_batches else batch_size
        self.cut = Cut(batch_size, update_freq, data_rank, data_size)
        self.num_workers = num_workers
        self.buffer_size = buffer_size
        self.max_epoch = max_epoch
        self.epoch = 1
        """Epoch (from 1) of the update yielded last."""
        self.end_of_epoch = False
        """Whether the update yielded last was the last of its epoch."""
        self._position = Position()
        self._stream: Generator[tuple[BatchPlan, Batch]] | None = None

    def updates(self) -> Iterator[list[Batch]]:
        """Batches of one update after the other, from where the loader stands.

        Ends after ``max_epoch``.

        Raises:
            UserError: the data is empty, or smaller than one update, or cannot be read.
        """
        try:
            while batches := self._next_update():
                yield batches
        finally:
            self._close()

    def skip_updates(self, count: int) -> None:
        """Throw the data of the next updates away, without reading it."""
        self._close()
        for plans in itertools.islice(self._plans(), count):
            self._move(plans[-1])

    def updates_per_epoch(self) -> int | None:
        """Updates in the current epoch, or None while the size of the data is not known."""
        samples = self.dataset.num_samples()
        epoch = self._position.epoch
        return None if samples is None else -(-samples // self.cut.samples_per_update(epoch))

    def state_dict(self) -> dict[str, Any]:
        """The place behind the update that was yielded last, whatever was made ahead."""
        return {
            **self._position.to_dict(),
            "fingerprint": self.dataset.fingerprint,
            "ingredients": self.dataset.ingredients,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a stored place; batch size, ranks and workers may differ.

        Raises:
            UserError: the place belongs to other data or another cutting of it.
        """
        self._close()
        _compare(state["fingerprint"], state.get("ingredients", {}), self.dataset)
        names = [field.name for field in fields(Position)]
        self._position = Position(**{name: int(state[name]) for name in names})
        self.epoch = self._position.epoch
        self.end_of_epoch = False

    def _plans(self) -> Iterator[list[BatchPlan]]:
        plans = plan_updates(self.dataset, self._position, self.cut, max_epoch=self.max_epoch)
        starts_epoch = self._position.samples == 0
        for update in plans:
            last = update[-1]
            if starts_epoch and last.ends_epoch:
                self._check_size(last)
            yield update
            starts_epoch = last.ends_epoch

    def _check_size(self, plan: BatchPlan) -> None:
        """Refuse an epoch that does not fill one update."""
        cut = self.cut
        wanted = cut.samples_per_update(plan.epoch)
        found = sum(
            len(self.dataset.shard(plan.epoch, i)) for i in range(self.dataset.num_shards())
        )
        if found < wanted:
            ranks = f" x {cut.data_size} ranks" if cut.data_size > 1 else ""
            if self.dataset.whole_batches:
                raise UserError(
                    f"--update-freq {cut.update_freq(plan.epoch)}{ranks} = {wanted} batches in an "
                    f"update, but an epoch of {self.dataset.name} has {found}; lower it, or the "
                    "size of a batch (--max-tokens, --batch-size)"
                )
            raise UserError(
                f"--batch-size {cut.batch_size} x --update-freq {cut.update_freq(plan.epoch)}"
                f"{ranks} = {wanted} sequences in an update, but an epoch of {self.dataset.name} "
                f"has {found}; lower them, or --tokens-per-sample"
            )

    def _next_update(self) -> list[Batch]:
        """The batches of the next update; none at the end."""
        if self._stream is None:
            plans = itertools.chain.from_iterable(self._plans())
            self._stream = make_batches(self.dataset, plans, self.num_workers, self.buffer_size)
        batches = []
        for plan, batch in self._stream:
            batches.append(batch)
            if plan.ends_update:
                self._move(plan)
                return batches
        return []

    def _move(self, plan: BatchPlan) -> None:
        self._position, self.epoch, self.end_of_epoch = plan.after, plan.epoch, plan.ends_epoch

    def _close(self) -> None:
        """Forget what was made ahead; workers end."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None


def valid_batches(
    dataset: BaseDataset[Any],
    *,
    batch_size: int,
    max_steps: int | None = None,
    num_workers: int = 0,
    buffer_size: int = 2,
    data_rank: int = 0,
    data_size: int = 1,
) -> Iterator[Batch]:
    """This rank's batches of one pass in the dataset's own order, at most ``max_steps``.

    Raises:
        UserError: the data is empty or cannot be read.
    """
    cut = Cut(1 if dataset.whole_batches else batch_size, lambda epoch: 1, data_rank, data_size)
    updates = plan_updates(dataset, Position(), cut, max_epoch=1)
    plans = itertools.islice(itertools.chain.from_iterable(updates), max_steps)
    for _, batch in make_batches(dataset, plans, num_workers, buffer_size):
        yield batch


def make_batches(
    dataset: BaseDataset[Any], plans: Iterator[BatchPlan], num_workers: int, buffer_size: int
) -> Generator[tuple[BatchPlan, Batch]]:
    """Make the batches that plans describe, in their order, here or in worker processes.

    An error appears in its place, behind the batches before it.
    """
    maker = _BatchMaker(dataset)
    if num_workers == 0:
        for plan in plans:
            yield plan, maker.make(plan)
        return
    loader: DataLoader[Any] = DataLoader(
        maker,
        batch_size=None,
        sampler=_Plans(plans),
        num_workers=num_workers,
        prefetch_factor=buffer_size,
        collate_fn=_unchanged,
        worker_init_fn=functools.partial(_end_with_parent, os.getpid()),
        multiprocessing_context="fork",
        generator=torch.Generator(),  # else the global generator would be advanced
    )
    with quiet_fork():
        items = iter(loader)
    try:
        for item in items:
            if isinstance(item, _Failure):
                raise item.error
            plan, arrays = item
            yield plan, _with_tensors(arrays)
    finally:
        # Left to the garbage collector, workers may miss the message that tells them to end.
        items._shutdown_workers()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Failure:
    """An error on its way to where it would have appeared without workers."""

    error: UserError


class _Plans(Sampler[Any]):
    """Hands plans to workers."""

    def __init__(self, plans: Iterator[BatchPlan]) -> None:
        self.plans = plans

    def __iter__(self) -> Iterator[BatchPlan | _Failure]:
        try:
            yield from self.plans
        except UserError as error:
            yield _Failure(error)


class _BatchMaker(Dataset[Any]):
    """Turns a plan into a batch."""

    def __init__(self, dataset: BaseDataset[Any]) -> None:
        self.dataset = dataset

    def make(self, plan: BatchPlan) -> Batch:
        samples = []
        for segment in plan.segments:
            shard = self.dataset.shard(segment.epoch, segment.shard)
            samples += [shard[segment.first + i] for i in range(segment.count)]
        return self.dataset.collate(samples, range(plan.first_id, plan.first_id + len(samples)))

    def __getitem__(self, plan: BatchPlan | _Failure) -> tuple[BatchPlan, Batch] | _Failure:
        if isinstance(plan, _Failure):
            return plan
        try:
            # Arrays travel through the pipe; tensors would need shared memory, which containers
            # often have little of.
            return plan, _with_arrays(self.make(plan))
        except UserError as error:
            return _Failure(error)


def _unchanged(item: Any) -> Any:
    return item


def _end_with_parent(parent: int, worker: int) -> None:
    """Let this worker end with its parent, and by SIGTERM only when its parent sent it.

    A signal to the whole process group asks the main process to stop; it still needs its workers.
    A main process that was killed sends nothing, so the worker also looks whether it is there.
    """
    can_wait = hasattr(signal, "sigtimedwait")
    if not can_wait:  # macOS
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def watch() -> None:
        while os.getppid() == parent:
            if not can_wait:
                time.sleep(PARENT_CHECK_SECONDS)
                continue
            received = signal.sigtimedwait({signal.SIGTERM}, PARENT_CHECK_SECONDS)
            if received is not None and received.si_pid == parent:
                break
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _with_arrays(batch: Batch) -> Any:
    values = ((field.name, getattr(batch, field.name)) for field in fields(batch))
    arrays: dict[str, Any] = {n: v.numpy() for n, v in values if isinstance(v, Tensor)}
    return replace(batch, **arrays)


def _with_tensors(batch: Any) -> Batch:
    values = ((field.name, getattr(batch, field.name)) for field in fields(batch))
    return replace(batch, **{n: torch.from_numpy(v) for n, v in values if hasattr(v, "dtype")})


def _compare(stored: str, ingredients: dict[str, str], dataset: BaseDataset[Any]) -> None:
    """Refuse a place in another order of sequences.

    Raises:
        UserError: naming what changed.
    """
    if stored == dataset.fingerprint:
        return
    changes = [
        f"{name} ({ingredients[name]}, now {now})"
        for name, now in dataset.ingredients.items()
        if ingredients.get(name, now) != now
    ]
    # Early checkpoints and some datasets have the fingerprint alone.
    what = " and ".join(changes) or "the text, the tokenizer, or a setting that cuts and orders it"
    raise UserError(
        f"{what} changed since the checkpoint was written, so its place in the data has no "
        "meaning; undo the change, or start a new run from it: --save-dir NEW --restore-file OLD "
        "--reset-dataloader"
    )
