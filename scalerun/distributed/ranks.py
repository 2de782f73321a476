"""Ranks: what one process knows of those that train with it, and how they agree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.distributed.mesh import ONE_RANK, Meshes, ModelMeshes, ParallelDims

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

Result = TypeVar("Result")


class Control:
    """Messages between ranks on the host: decisions, small objects, errors.

    Every rank has to make the same calls in the same order. With one rank nothing is sent.

    Args:
        rank: of this process.
        world_size: number of processes.
        group: of all ranks, with a backend that carries host tensors; None for a single rank.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, group: ProcessGroup | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.group = group
        self._agreed: BaseException | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for all: it logs, and writes what is there once."""
        return self.rank == 0

    def max(self, *values: float) -> list[float]:
        """The largest of each value over the ranks."""
        if self.group is None:
            return list(values)
        vector = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(vector, torch.distributed.ReduceOp.MAX, group=self.group)
        return vector.tolist()

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return self.max(float(flag))[0] > 0

    def gather(self, value: Result) -> list[Result]:
        """The values of all ranks, on every rank. They travel as pickles."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value, group=self.group)
        return values

    def from_main(self, value: Result) -> Result:
        """Rank 0's value, on every rank."""
        if self.group is None:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def together(self, work: Callable[[], Result], *, named: bool = True) -> Result:
        """Do something that may fail on some ranks only; then all fail, with the first's error.

        Unless all ranks failed the error gets a note (PEP 678) that names the rank.

        The work may itself call :meth:`together` or :meth:`on_main`: a rank that has failed before
        it got there then ends the others in there. It may not gather in any other way.

        Args:
            named: name the rank where not all failed.

        Raises:
            UserError: as raised by ``work`` on the lowest rank where it failed.
            OSError: the same.
        """
        if self.group is None:
            return work()
        error: UserError | OSError | None = None
        try:
            result = work()
        except (UserError, OSError) as own:
            if own is self._agreed:
                raise  # every rank has it already
            error = own
        # Called in every update: objects, which travel slowly, are sent only where one is.
        if not self.any(error is not None):
            return result
        # Some may be in another call of this method, so whoever failed says how to name it.
        found = self.gather(None if error is None else (error, named))
        failed = [rank for rank, each in enumerate(found) if each is not None]
        agreed, to_name = found[failed[0]]  # type: ignore[misc]
        self._agreed = error if error is not None and failed[0] == self.rank else agreed
        if to_name and len(failed) < self.world_size:
            self._agreed.add_note(f"rank {failed[0]}")
        raise self._agreed

    def on_main(self, work: Callable[[], Result]) -> Result:
        """Do something on rank 0 alone; every rank gets the result or the error.

        Raises:
            UserError: as raised by ``work``.
            OSError: the same.
        """
        result = self.together(lambda: work() if self.is_main else None, named=False)
        return self.from_main(result)  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.group is not None:
            torch.distributed.barrier(group=self.group)


class Ranks:
    """This process among those that train together.

    Args:
        dims: the degrees of parallelism.
        control: carries decisions.
        saving: carries what is said while a checkpoint is written, maybe by another thread.
        meshes: None for a single rank.
        local_rank: number of this process on its host, and of its GPU.
        store: where ranks note how far they are; None for a single rank.
    """

    def __init__(
        self,
        dims: ParallelDims | None = None,
        *,
        control: Control | None = None,
        saving: Control | None = None,
        meshes: Meshes | None = None,
        local_rank: int = 0,
        store: Store | None = None,
    ) -> None:
        self.dims = dims or ParallelDims()
        self.control = control or Control()
        self.saving = saving or Control()
        self.meshes = meshes
        self.local_rank = local_rank
        self._store = store

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.control.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.control.world_size

    @property
    def is_main(self) -> bool:
        """Whether this rank logs, and writes what is there once."""
        return self.control.is_main

    @property
    def model_meshes(self) -> ModelMeshes:
        """The axes that layers compute over."""
        return ONE_RANK if self.meshes is None else self.meshes.model

    @property
    def gradient_rank(self) -> int:
        """Which of the ranks, or groups of them, this is that see other tokens."""
        return self.rank // self.dims.tensor

    @property
    def data_rank(self) -> int:
        """Which part of each update's batches this rank reads."""
        return self.gradient_rank // self.dims.sequence

    @property
    def sequence_rank(self) -> int:
        """Which slice of each sequence this rank has."""
        return self.gradient_rank % self.dims.sequence

    @property
    def data_size(self) -> int:
        """In how many parts they are cut."""
        return self.dims.data_size

    def note(self, place: str) -> None:
        """Leave word of how far this rank is, for when it or another one stops.

        Raises:
            UserError: whoever keeps the ranks' store is gone, and the others with it.
        """
        if self._store is None:
            return
        try:
            self._store.set(f"place/{self.rank}", place)
        except RuntimeError as error:
            raise UserError(
                f"the process that the ranks meet at is gone, so the run ends in {place}; the "
                "checkpoints are intact: give the same command again"
            ) from error

    def places(self) -> dict[int, str]:
        """How far each rank is, as far as can be told."""
        found: dict[int, str] = {}
        if self._store is None:
            return found
        # The host of the store may be the one that is gone.
        with contextlib.suppress(RuntimeError):
            for rank in range(self.size):
                if self._store.check([f"place/{rank}"]):
                    found[rank] = self._store.get(f"place/{rank}").decode()
        return found

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that see other tokens; in place."""
        if self.meshes is not None and self.dims.gradient_size > 1:
            torch.distributed.all_reduce(tensor, group=self.meshes.gradient.get_group())
        return tensor


ALONE = Ranks()
"""A single process."""
