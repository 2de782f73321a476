"""CheckpointManager: when a run saves, what it saves, and what it finds again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch

import scalerun
from scalerun.checkpoint.checkpoint_folder import BEST, LAST, CheckpointFolder
from scalerun.checkpoint.manifest import (
    DamagedCheckpoint,
    Manifest,
    read_manifest,
    verify,
)
from scalerun.checkpoint.reader import (
    find_checkpoint,
    load_state,
    load_tensors,
    newest_whole,
    read_state,
    run_file,
    whole_manifests,
)
from scalerun.checkpoint.retention import Retention
from scalerun.checkpoint.state_tree import split_state, to_json
from scalerun.checkpoint.storage import stage
from scalerun.checkpoint.writer import Content, check_space, write_checkpoint, write_error
from scalerun.dataclass.configs import CheckpointConfig
from scalerun.distributed.ranks import ALONE, Ranks

__all__ = [
    "CheckpointManager",
    "LoadedCheckpoint",
    "Stateful",
    "find_checkpoint",
    "load_tensors",
    "read_state",
    "run_file",
    "verify",
]

logger = logging.getLogger(__name__)

WEIGHTS = frozenset(("model", "task"))
"""Parts that ``--finetune-from-model`` loads: the second one compares the vocabulary."""


class Stateful(Protocol):
    """Anything that can be saved: nested dictionaries of tensors and JSON values."""

    def state_dict(self) -> Any:
        """The live state."""

    def load_state_dict(self, state: Any) -> Any:
        """Continue from a state."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Where a run goes on."""

    path: Path
    num_updates: int
    epoch_end: int | None
    """The epoch that ended with this update, if one did."""
    state: dict[str, Any]
    """Plain values of every part, also of parts that were not loaded."""
    restored: bool
    """It came from another run, not from the run folder."""
    missing: frozenset[str] = frozenset()
    """Optional parts that were not loaded: the checkpoint lacks them, or they were not wanted."""


class CheckpointManager:
    """Saves and restores a run, in one folder per checkpoint.

    A checkpoint is written under a temporary name, forced to the disk and then renamed, so a
    checkpoint that has its name is whole. With ``--save-async`` the state is first copied to the
    host, and one thread writes the copy; at most one checkpoint is being written at a time. Errors
    of that thread are raised by the next call of :meth:`save`, :meth:`poll`, :meth:`wait` or
    :meth:`close`.

    Args:
        cfg: where, how often kept, how.
        run_files: relative name -> text or source file; each checkpoint gets a copy. The content
            is read now.
        on_event: called, on the calling thread, with records such as
            ``{"kind": "event", "event": "saved", ...}``.
        ranks: each saves its own part, and makes every call of the others.

    Raises:
        UserError: the run folder cannot be written.
    """

    def __init__(
        self,
        cfg: CheckpointConfig,
        *,
        run_files: Mapping[str, str | Path] | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.cfg = cfg
        self.control, self.saving = ranks.control, ranks.saving
        self.folder = CheckpointFolder(Path(cfg.save_dir))
        self.on_event = on_event or (lambda record: None)
        self.run_files = {
            name: value.read_bytes() if isinstance(value, Path) else value.encode()
            for name, value in (run_files or {}).items()
        }
        self.retention = Retention(
            keep_last_updates=cfg.keep_last_updates,
            keep_last_epochs=cfg.keep_last_epochs,
            keep_best=cfg.keep_best_checkpoints,
            maximize=cfg.maximize_best_checkpoint_metric,
            metric_name=f"{cfg.best_checkpoint_subset or ''}/{cfg.best_checkpoint_metric}",
        )
        self._known_good: set[int] = set()
        self._known_damaged: set[int] = set()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: Future[dict[str, Any]] | None = None
        if not cfg.no_save:
            self.control.on_main(self.folder.open_for_writing)

    def save(
        self,
        num_updates: int,
        state: Mapping[str, Stateful],
        *,
        epoch_end: int | None = None,
        metric: float | None = None,
        final: bool = False,
    ) -> None:
        """Save a run's state as ``checkpoint_<num_updates>``.

        An update that is saved already is not saved again; a new metric or epoch end is noted.

        Args:
            state: objects by part; parts are loaded under the same names.
            epoch_end: the epoch (from 1) that this update ends.
            metric: the value of ``--best-checkpoint-metric`` at this update.
            final: return only when the checkpoint is on the disk.

        Raises:
            UserError: the disk is too small or cannot be written; older checkpoints are intact.
        """
        self.wait()
        if self.cfg.no_save:
            return
        manifest = self._manifest(num_updates, epoch_end, metric)
        if self.control.on_main(lambda: self._is_saved(num_updates)):
            self.control.on_main(lambda: self._annotate(manifest))
            return
        started = time.monotonic()
        content = self._collect(manifest, state)
        check_space(self.folder, content, self.control)
        if self.cfg.save_async and not final:
            content = replace(content, tensors=stage(content.tensors))
            held_up = time.monotonic() - started
            self._in_flight = self._executor.submit(self._write, content, started, held_up)
        else:
            self._report(self._write(content, started))

    def load_latest(
        self,
        state: Mapping[str, Stateful],
        *,
        skip: Collection[str] = (),
        optional: Collection[str] = (),
    ) -> LoadedCheckpoint | None:
        """Restore the newest whole checkpoint of the run folder, or else ``--restore-file``.

        In its place ``--finetune-from-model`` gives :data:`WEIGHTS` alone. A damaged checkpoint is
        reported, left alone, and the one before it is used.

        Args:
            state: objects by part, as for :meth:`save`.
            skip: parts not to load from ``--restore-file``; a run's own checkpoint is loaded whole,
                so that the same command goes on after a stop.
            optional: parts that a checkpoint need not have; see ``LoadedCheckpoint.missing``.

        Returns:
            None for a fresh run.

        Raises:
            UserError: the other run's checkpoint is missing or damaged, all checkpoints of the run
                are damaged, or the checkpoint does not fit.
        """
        self.wait()
        started = time.monotonic()
        folder = self.control.on_main(lambda: newest_whole(self.folder, self._report_damaged))
        own = folder is not None
        flag, given = self._other_run()
        if own and given is not None:
            logger.info("%s is not used: %s has its own checkpoints", flag, self.folder.path)
        if folder is None and given is not None:
            folder = self.control.on_main(lambda: find_checkpoint(given, flag))
        if folder is None:
            return None
        manifest = read_manifest(folder)
        if self.cfg.finetune_from_model is not None:
            skip = state.keys() - WEIGHTS
        left_out = () if own else skip
        wanted = {part: owner for part, owner in state.items() if part not in left_out}
        whole = folder
        plain = self.control.together(lambda: load_state(whole, wanted, optional=optional))
        if own:
            self._known_good.add(manifest.num_updates)
            if not self.cfg.no_save:
                self.control.on_main(self._update_pointers)
        unused = sorted(plain.keys() - state.keys())
        if unused:
            logger.warning("%s also has %s, which this run does not use", folder, ", ".join(unused))
        self.on_event(
            {
                "kind": "event",
                "event": "resumed",
                "checkpoint": str(folder),
                # Without the schedule's state the run counts from the start.
                "num_updates": 0 if "lr_scheduler" in left_out else manifest.num_updates,
                "seconds": time.monotonic() - started,
            }
        )
        return LoadedCheckpoint(
            path=folder,
            num_updates=manifest.num_updates,
            epoch_end=manifest.epoch_end,
            state=plain,
            restored=not own,
            missing=frozenset(
                p for p in optional if p in state and not (p in wanted and p in plain)
            ),
        )

    def _other_run(self) -> tuple[str, str | None]:
        """The flag that names another run's checkpoint, and its value."""
        if self.cfg.finetune_from_model is not None:
            return "--finetune-from-model", self.cfg.finetune_from_model
        return "--restore-file", self.cfg.restore_file

    def best_metric(self) -> float | None:
        """The best value of the checkpoint metric among the run's checkpoints."""
        self.wait()
        best = self.retention.best(whole_manifests(self.folder, self._known_damaged))
        return best[0].metric if best else None

    def poll(self) -> None:
        """Report a finished write, or raise its error; does not wait and costs nothing."""
        if self._in_flight is not None and self._in_flight.done():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            UserError: the checkpoint could not be written.
        """
        if self._in_flight is not None:
            # After an interrupt the write is still going on, and must be waited for again.
            try:
                event = self._in_flight.result()
            finally:
                if self._in_flight.done():
                    self._in_flight = None
            self._report(event)

    def close(self) -> None:
        """Wait for the last write."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _manifest(self, num_updates: int, epoch_end: int | None, metric: float | None) -> Manifest:
        interval = self.cfg.save_interval_updates
        by_update = epoch_end is None or (interval > 0 and num_updates % interval == 0)
        kinds = ["update"] * by_update + ["epoch"] * (epoch_end is not None)
        return Manifest(
            num_updates=num_updates,
            files={},
            version=scalerun.__version__,
            torch_version=torch.__version__,
            world_size=self.control.world_size,
            kinds=kinds,
            epoch_end=epoch_end,
            metric=metric,
            metric_name=None if metric is None else self.retention.metric_name,
        )

    def _is_saved(self, num_updates: int) -> bool:
        """Whether this update lies on the disk, whole. A damaged one does not count."""
        folder = self.folder.checkpoint(num_updates)
        if not folder.is_dir():
            return False
        try:
            verify(folder, checksums=num_updates not in self._known_good)
        except DamagedCheckpoint as error:
            self._report_damaged(num_updates, folder, error.reason)
            return False
        return True

    def _annotate(self, news: Manifest) -> None:
        """Add an epoch end or a metric to a checkpoint that was saved without."""
        folder = self.folder.checkpoint(news.num_updates)
        old = read_manifest(folder)
        changes: dict[str, Any] = {}
        if news.epoch_end is not None and old.epoch_end is None:
            changes |= {"epoch_end": news.epoch_end, "kinds": sorted({*old.kinds, *news.kinds})}
        if news.metric is not None and (old.metric, old.metric_name) != (
            news.metric,
            news.metric_name,
        ):
            changes |= {"metric": news.metric, "metric_name": news.metric_name}
        if changes:
            try:
                replace(old, **changes).rewrite(folder)
                self._update_pointers()
            except OSError as error:
                raise write_error(self.folder, news.num_updates, error) from error

    def _collect(self, manifest: Manifest, state: Mapping[str, Stateful]) -> Content:
        """Ask the parts for their state; tensors are the live ones."""
        parts = {part: split_state(owner.state_dict()) for part, owner in state.items()}
        return Content(
            manifest=manifest,
            tensors={part: tensors for part, (tensors, _) in parts.items() if tensors},
            plain=to_json({part: plain for part, (_, plain) in parts.items()}),
            run_files=self.run_files,
        )

    def _write(
        self, content: Content, started: float, held_up: float | None = None
    ) -> dict[str, Any]:
        """Write one checkpoint, then drop old ones; return the event to report.

        Args:
            started: when the save was asked for, on the monotonic clock.
            held_up: seconds for which training stood still; None if for all of the save.
        """
        try:
            manifest = write_checkpoint(self.folder, content, self.saving)
            self._known_good.add(manifest.num_updates)
            self._known_damaged.discard(manifest.num_updates)
            self.saving.on_main(self._update_pointers)
        except OSError as error:
            raise write_error(self.folder, content.num_updates, error) from error
        seconds = time.monotonic() - started
        return {
            "kind": "event",
            "event": "saved",
            "checkpoint": self.folder.checkpoint(manifest.num_updates).name,
            "num_updates": manifest.num_updates,
            "bytes": manifest.num_bytes,
            "seconds": seconds,
            "seconds_held_up": seconds if held_up is None else held_up,
        }

    def _update_pointers(self) -> None:
        """Point at the newest and the best checkpoint, then delete what no rule keeps."""
        manifests = whole_manifests(self.folder, self._known_damaged)
        if not manifests:
            return
        last = manifests[0].num_updates
        protected = {last}
        self.folder.point(LAST, last)
        best = self.retention.best(manifests)
        if best:
            self.folder.point(BEST, best[0].num_updates)
            protected.add(best[0].num_updates)
        for num_updates in self.retention.expired(manifests, protected):
            self.folder.remove(num_updates)

    def _report(self, event: dict[str, Any]) -> None:
        self.on_event(event)

    def _report_damaged(self, num_updates: int, folder: Path, reason: str) -> None:
        self._known_damaged.add(num_updates)
        self.on_event(
            {
                "kind": "event",
                "event": "damaged",
                "checkpoint": str(folder),
                "num_updates": num_updates,
                "reason": reason,
            }
        )
