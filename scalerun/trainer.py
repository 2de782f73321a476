"""The training loop: one place that orders the work of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch

from scalerun.criterions.base_criterion import CriterionOutput, Objective
from scalerun.data.batch import Batch
from scalerun.dataclass.configs import ScalerunConfig
from scalerun.dataclass.errors import UserError
from scalerun.distributed.launch import seed_forward
from scalerun.distributed.stop_signal import StopRequestedError, StopSignal
from scalerun.evaluation import SubsetResult, evaluate
from scalerun.logging.metrics import Metrics, bits_per_byte, perplexity
from scalerun.logging.nan_detector import NanDetector
from scalerun.models.base_model import Architecture
from scalerun.modules.constraint import constrain
from scalerun.optim.clip import GradNorm
from scalerun.trainer_parts import Progress, TrainerParts

logger = logging.getLogger(__name__)


class Trainer:
    """Orders the work of a run. Its parts are built in ``cli/train.py`` and handed in.

    An *update* is one optimizer step; it uses ``--update-freq`` batches.
    """

    def __init__(self, cfg: ScalerunConfig, parts: TrainerParts, stop_signal: StopSignal) -> None:
        self.cfg = cfg
        self.parts = parts
        self.stop_signal = stop_signal
        self.task, self.model, self.criterion = parts.task, parts.model, parts.criterion
        self.optimizer, self.lr_scheduler = parts.optimizer, parts.lr_scheduler
        self.loader, self.checkpoints, self.sinks = parts.loader, parts.checkpoints, parts.sinks
        self.throughput = parts.throughput
        self.ranks = parts.ranks
        self.metrics = Metrics(self.ranks.sum_over_data if self.ranks.size > 1 else None)
        self.progress = Progress()
        self.place: dict[str, Any] = {}
        """The loader's state before the update that is being done."""
        self.metric: tuple[int, float] | None = None
        """The checkpoint metric, with the update it belongs to."""

    @property
    def num_updates(self) -> int:
        """Finished updates."""
        return self.progress.num_updates

    def train(self) -> None:
        """Run until the end or until a signal asks for a stop; :meth:`resume` comes first.

        Raises:
            FloatingPointError: a loss or gradient is not finite and ``--nonfinite`` is ``stop``.
            UserError: the data cannot be used, or a checkpoint cannot be written.
        """
        constrain(self.model)
        with self.parts.profiler, self.stop_signal.deferred():
            if self.progress.unfinished_validation:
                self.validate()
            for batches in self.updates():
                stepped = self.try_step(batches)
                self.sinks.advance(self.num_updates)
                if stepped and self.num_updates % self.cfg.common.log_interval == 0:
                    self.log()
                self.checkpoints.poll()
                with self.throughput.pause():
                    if self.validation_is_due(stepped):
                        self.validate()
                    if self.save_is_due(stepped):
                        self.save()
            with self.throughput.pause():
                self.finish()

    def resume(self) -> None:
        """Load the run folder's newest good checkpoint, or another run's, or nothing.

        Raises:
            UserError: the checkpoint cannot be used, or does not fit the configuration.
        """
        ckpt = self.cfg.checkpoint
        skip = {
            name
            for name, reset in (
                ("optimizer", ckpt.reset_optimizer),
                ("lr_scheduler", ckpt.reset_lr_scheduler),
                ("metrics", ckpt.reset_meters),
                ("throughput", ckpt.reset_meters),
                ("loader", ckpt.reset_dataloader),
                # A new run may have a loss of its own, and a function of its own of equal shapes.
                ("criterion", True),
                ("architecture", True),
            )
            if reset
        }
        loaded = self.checkpoints.load_latest(
            self.stateful(), skip=skip, optional=("ema", "loss_scaler", "criterion")
        )
        if loaded is not None and loaded.restored:
            Architecture(self.cfg.model).adapt(loaded.state.get("architecture"), loaded.path)
            if ckpt.reset_lr_scheduler:
                self.progress.num_updates = 0
            if ckpt.reset_meters:
                self.progress.best_metric = None
                self.progress.validations_without_gain = 0
        if not self.ranks.is_main:
            self.metrics.forget_sums()  # rank 0 goes on with those of all ranks
        if loaded is not None and self.parts.ema is not None and "ema" in loaded.missing:
            self.parts.ema.restart()
        self.lr_scheduler.step_update(self.num_updates)
        self.report_data()

    def stateful(self) -> dict[str, Any]:
        """The parts whose state a checkpoint holds, by the name it has there."""
        parts = {
            "architecture": Architecture(self.cfg.model),
            "criterion": Objective(self.cfg.criterion),
            "model": self.model,
            "task": self.task,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "loader": self.loader,
            "metrics": self.metrics,
            "throughput": self.throughput,
            "trainer": self.progress,
        }
        if self.parts.loss_scaler is not None:
            parts["loss_scaler"] = self.parts.loss_scaler
        if self.parts.ema is not None:
            parts["ema"] = self.parts.ema
        return parts

    def updates(self) -> Iterator[list[Batch]]:
        """The batches of one update after the other, until something ends the run."""
        stream = self.loader.updates()
        first = self.num_updates
        self.throughput.start()
        while (reason := self.end_reason()) is None:
            self.skip_batches()
            self.place = self.loader.state_dict()
            try:
                batches = self.ranks.control.together(lambda: self.next_batches(stream))
            except StopRequestedError:
                continue
            except UserError:
                # A bad record far into the run: nothing that was learned is lost.
                if self.num_updates:
                    self.save(final=True)
                raise
            if batches is None:
                last = self.cfg.optimization.max_epoch
                reason = f"the end of epoch {last} is reached; raise --max-epoch to go on"
                break
            yield batches
        idle = self.num_updates == first and self.stop_signal.signum is None
        logger.info("%s: %s", "nothing to do" if idle else "training ends", reason)

    def next_batches(self, stream: Iterator[list[Batch]]) -> list[Batch] | None:
        """This rank's batches of the next update. A signal breaks the wait of a single rank off."""
        if self.ranks.size > 1:
            return next(stream, None)
        with self.stop_signal.immediate():
            return next(stream, None)

    def end_reason(self) -> str | None:
        """Why the run is over and what prolongs it, or None while it is not.

        The ranks agree on what is not the same on all of them: signals and clocks.
        """
        opt, progress = self.cfg.optimization, self.progress
        signum, wall = self.ranks.control.max(
            self.stop_signal.signum or 0, self.throughput.train_wall
        )
        self.stop_signal.signum = int(signum) or None
        if self.stop_signal.signum is not None:
            return "a signal asked for it"
        if opt.max_update and self.num_updates >= opt.max_update:
            return f"{self.num_updates} updates are done; raise --max-update to go on"
        if opt.stop_time_hours and wall >= opt.stop_time_hours * 3600:
            return self.time_is_up()
        if opt.patience > 0 and progress.validations_without_gain >= opt.patience:
            return (
                f"{opt.patience} validations without a better {self.metric_name()}; raise "
                "--patience to go on"
            )
        if self.num_updates and self.optimizer.get_lr() <= opt.stop_min_lr:
            return f"the learning rate is at or below --stop-min-lr {opt.stop_min_lr:g}"
        return None

    def time_is_up(self) -> str:
        """The reason that ``--stop-time-hours`` gives, with what the model misses by it."""
        opt = self.cfg.optimization
        reason = (
            f"stopped by --stop-time-hours {opt.stop_time_hours:g} at update {self.num_updates}"
        )
        if opt.max_update:
            reason += f" of {opt.max_update}"
            lr, last = self.optimizer.get_lr(), self.lr_scheduler.lr_at(opt.max_update)
            if last < lr:
                reason += f", before the learning rate came down from {lr:.3g} to {last:.3g}"
        return f"{reason}; raise --stop-time-hours to go on"

    def skip_batches(self) -> None:
        """Throw away the data of ``--skip-batches`` ranges that begin with the next update."""
        for first, last in self.cfg.dataset.skipped_ranges():
            done = [first, last] in self.progress.skipped_ranges
            if first == self.num_updates + 1 and not done:
                self.loader.skip_updates(last - first + 1)
                self.progress.skipped_ranges.append([first, last])
                self.event("skipped", reason="--skip-batches", updates=last - first + 1)

    def try_step(self, batches: list[Batch]) -> bool:
        """Do one update; if it cannot be done, save the run as it was before it."""
        try:
            with self.parts.profiler.record(self.num_updates + 1):
                return self.train_step(batches)
        except FloatingPointError:
            self.loader.load_state_dict(self.place)
            if self.num_updates:
                self.save(final=True)
            raise

    def train_step(self, batches: list[Batch]) -> bool:
        """Do one update: count targets, run each batch forward and backward, clip, step.

        The loss is the sum over target tokens divided by the number of target tokens in the whole
        update, over all ranks. Cutting the same tokens into other batch sizes, accumulation counts
        or rank counts leaves the gradient as it was.

        Returns:
            Whether the weights changed; they do not when the gradient is not finite and
            ``--nonfinite`` is ``skip``, or when float16 overflowed.

        Raises:
            FloatingPointError: a loss or gradient is not finite; the weights are left untouched.
        """
        self.ranks.note(f"update {self.num_updates + 1}")
        self.model.train()
        batches = [self.task.own_part(batch, self.model, self.ranks) for batch in batches]
        num_targets, num_samples = self.count_over_data(batches)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.parts.precision.device)
        stats = []
        for index, batch in enumerate(batches):
            with self.parts.gradients.batch(last=index == len(batches) - 1):
                output = self.forward_backward(batch, index, num_targets)
            loss_sum += output.loss_sum.detach()
            stats.append(output.stats)
        self.parts.gradients.finish()
        if self.parts.loss_scaler is not None:
            self.optimizer.multiply_grads(1.0 / self.parts.loss_scaler.scale_value)
        opt = self.cfg.optimization
        grad_norm = self.optimizer.clip_grad_norm(opt.clip_norm, opt.clip_norm_type)  # type: ignore[arg-type]
        finite = math.isfinite((grad_norm.total + loss_sum).item())  # the one wait for the device
        finite = not self.ranks.control.any(not finite)
        if not self.may_step(finite, batches):
            self.optimizer.zero_grad()
            return False
        self.optimizer.step()
        constrain(self.model)
        self.optimizer.zero_grad()
        self.progress.num_updates += 1
        self.progress.skips_in_a_row = 0
        if self.parts.ema is not None:
            self.parts.ema.step(self.num_updates)
        for each in stats:
            self.metrics.add(each)
        num_own = sum(batch.num_targets for batch in batches)
        self.metrics.add_ratio("loss", loss_sum / math.log(2), float(num_own))
        self.count(grad_norm)
        self.throughput.update(num_targets, num_samples)
        self.lr_scheduler.step_update(self.num_updates)  # sets the rate of the next update
        return True

    def count_over_data(self, batches: list[Batch]) -> tuple[int, int]:
        """Target tokens and sequences of the update, over all ranks."""
        counts = [sum(b.num_targets for b in batches), sum(len(b.sample_ids) for b in batches)]
        if self.ranks.size > 1:
            device = self.parts.precision.device
            counts = self.ranks.sum_over_data(torch.tensor(counts, device=device)).tolist()
        return counts[0], counts[1] // self.ranks.dims.sequence

    def forward_backward(self, batch: Batch, index: int, num_targets: int) -> CriterionOutput:
        """Add one batch's gradients."""
        place = index * self.ranks.dims.gradient_size + self.ranks.gradient_rank
        seed_forward(self.cfg.common.seed, self.num_updates, place)
        batch = batch.to(self.parts.precision.device)
        with self.parts.precision.autocast():
            output = self.task.train_step(batch, self.model, self.criterion)
        loss = output.loss_sum
        if output.aux_loss is not None:
            loss = loss + output.num_targets * output.aux_loss
        loss = loss / max(num_targets, 1)
        if self.parts.loss_scaler is not None:
            loss = self.parts.loss_scaler.scale(loss)
        loss.backward()
        return output

    def may_step(self, finite: bool, batches: list[Batch]) -> bool:
        """Whether the gradients may be used; says and counts it when they may not."""
        scaler = self.parts.loss_scaler
        if scaler is not None:
            scaler.update(finite)
            if not finite:
                scale = scaler.scale_value
                self.event("skipped", reason=f"float16 overflowed; the loss scale is now {scale:g}")
            return finite
        if finite:
            return True
        where = self.describe_nonfinite(batches)
        common = self.cfg.common
        if common.nonfinite == "stop":
            raise FloatingPointError(
                f"{where}; the weights are those of update {self.num_updates}; give "
                f"--nonfinite skip or --skip-batches {self.num_updates + 1} to leave this data "
                "out, or begin again with a lower --lr"
            )
        self.progress.skips_in_a_row += 1
        self.event("skipped", reason=where)
        if self.progress.skips_in_a_row >= common.nonfinite_limit:
            raise FloatingPointError(
                f"{where}; these were {common.nonfinite_limit} updates in a row; lower --lr"
            )
        return False

    def describe_nonfinite(self, batches: list[Batch]) -> str:
        """Run the update again with every module watched, and name the first that went wrong."""
        self.optimizer.zero_grad()
        with NanDetector(self.model) as detector:
            num_targets, _ = self.count_over_data(batches)
            for index, batch in enumerate(batches):
                self.forward_backward(batch, index, num_targets)
            where = detector.describe() if detector.finding is not None else None
        self.optimizer.zero_grad()
        found = self.ranks.control.gather(where)
        rank = next((rank for rank, finding in enumerate(found) if finding is not None), 0)
        return (
            f"update {self.num_updates + 1} on rank {rank} is not finite: "
            f"{found[rank] or detector.describe()}"
        )

    def count(self, grad_norm: GradNorm) -> None:
        """Add what is the same on all ranks to the statistics."""
        limit = self.cfg.optimization.clip_norm
        clipped = 100.0 * float(limit > 0 and grad_norm.total.item() > limit)
        share = 1.0 / self.ranks.dims.gradient_size  # they count once, not once for each rank
        values = {**grad_norm.stats(), "clip": torch.tensor(clipped)}
        self.metrics.add({name: (value, share) for name, value in values.items()})
        scaler = self.parts.loss_scaler
        self.metrics.set(
            {
                "lr": self.optimizer.get_lr(),
                "loss_scale": scaler.scale_value if scaler is not None else 1.0,
            }
        )

    def log(self) -> None:
        """Write the training record of the updates since the last one."""
        values = self.metrics.flush(self.num_updates)
        loss = values.get("nll_loss", values.get("loss", math.nan))
        record: dict[str, Any] = {"kind": "train", "epoch": self.loader.epoch, **values}
        record["ppl"] = perplexity(loss)
        bytes_per_token = self.loader.dataset.counts().bytes_per_token
        if bytes_per_token:
            record["bits_per_byte"] = bits_per_byte(loss, bytes_per_token)
        self.sinks.write(record | self.throughput.flush())
        self.report_data()

    def report_data(self) -> None:
        """Write what was found in the data since the last call."""
        for report in self.task.data_report():
            self.sinks.write({"kind": "event", "num_updates": self.num_updates, **report})

    def validation_is_due(self, stepped: bool) -> bool:
        """Whether this update ends with a validation."""
        data, n = self.cfg.dataset, self.num_updates
        if data.disable_validation or not self.parts.valid_subsets:
            return False
        if n < data.validate_after_updates or self.progress.validated_at == n:
            return False
        by_updates = (
            stepped and data.validate_interval_updates and n % data.validate_interval_updates == 0
        )
        by_epoch = data.validate_interval and self.loader.epoch % data.validate_interval == 0
        return bool(by_updates or (by_epoch and self.loader.end_of_epoch))

    def validate(self) -> None:
        """Score every validation set; a signal breaks it off, to be done again after the resume."""
        self.progress.unfinished_validation = True
        self.ranks.note(f"the validation after update {self.num_updates}")
        try:
            results = self.score()
        except UserError:
            # A bad record far into a validation set: nothing that was learned is lost.
            if self.num_updates:
                self.save(final=True)
            raise
        if results is None:
            return
        self.progress.unfinished_validation = False
        self.progress.validated_at = self.num_updates
        for result in results:
            self.sinks.write({"kind": "valid", "num_updates": self.num_updates, **result.record()})
        self.judge(results)

    def score(self) -> list[SubsetResult] | None:
        """Evaluate the model on every validation set; None when a signal breaks it off."""
        results = []
        for subset in self.parts.valid_subsets:
            result = evaluate(
                self.task,
                self.model,
                self.criterion,
                subset,
                batch_size=self.cfg.dataset.batch_size_valid or self.cfg.dataset.batch_size or 1,
                precision=self.parts.precision,
                max_steps=self.cfg.dataset.max_valid_steps,
                num_workers=self.cfg.dataset.num_workers,
                should_stop=lambda: self.ranks.control.any(self.stop_signal.signum is not None),
                ranks=self.ranks,
            )
            if result is None:
                return None
            results.append(result)
        return results

    def judge(self, results: list[SubsetResult]) -> None:
        """Compare the checkpoint metric with the best so far; save a new best."""
        ckpt = self.cfg.checkpoint
        by_name = {result.subset: result for result in results}
        result = by_name[ckpt.best_checkpoint_subset or results[0].subset]
        value = result.record()[ckpt.best_checkpoint_metric]
        if not isinstance(value, float | int) or not math.isfinite(value):
            return
        self.metric = (self.num_updates, float(value))
        best = self.progress.best_metric
        sign = -1 if ckpt.maximize_best_checkpoint_metric else 1
        if best is None or sign * value < sign * best:
            self.progress.best_metric = float(value)
            self.progress.validations_without_gain = 0
        else:
            self.progress.validations_without_gain += 1
        if self.progress.validations_without_gain == 0 or ckpt.keep_best_checkpoints > 1:
            self.save()

    def metric_name(self) -> str:
        """The checkpoint metric with its validation set, for people."""
        ckpt = self.cfg.checkpoint
        subset = ckpt.best_checkpoint_subset or self.parts.valid_subsets[0]
        return f"{ckpt.best_checkpoint_metric} on {subset}"

    def save_is_due(self, stepped: bool) -> bool:
        """Whether this update ends with a checkpoint."""
        ckpt, n = self.cfg.checkpoint, self.num_updates
        by_updates = stepped and ckpt.save_interval_updates and n % ckpt.save_interval_updates == 0
        return bool(by_updates or self.epoch_end_to_save() is not None)

    def epoch_end_to_save(self) -> int | None:
        """The epoch that has just ended, where its end is to be saved."""
        ckpt, loader = self.cfg.checkpoint, self.loader
        if ckpt.no_epoch_checkpoints or not ckpt.save_interval or not loader.end_of_epoch:
            return None
        return loader.epoch if loader.epoch % ckpt.save_interval == 0 else None

    def save(self, *, final: bool = False) -> None:
        """Save the run as it stands, with the checkpoint metric if this update has one."""
        self.ranks.note(f"saving after update {self.num_updates}")
        measured = self.metric is not None and self.metric[0] == self.num_updates
        if not self.cfg.checkpoint.no_save:
            self.checkpoints.save(
                self.num_updates,
                self.stateful(),
                epoch_end=self.epoch_end_to_save(),
                metric=self.metric[1] if self.metric is not None and measured else None,
                final=final,
            )

    def finish(self) -> None:
        """Validate and save what the end of the run has not validated and saved yet."""
        stopped = self.stop_signal.signum is not None
        data = self.cfg.dataset
        wanted = self.parts.valid_subsets and not data.disable_validation
        if not stopped and not self.metrics.is_empty():
            self.log()
        if wanted and not stopped and self.progress.validated_at != self.num_updates:
            self.validate()
        self.report_data()
        self.save(final=True)
        if stopped:
            self.event("stopped", signal=self.stop_signal.signum)

    def event(self, name: str, **details: Any) -> None:
        """Write an event record."""
        record = {"kind": "event", "event": name, "num_updates": self.num_updates, **details}
        self.sinks.write(record)
