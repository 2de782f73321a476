"""The settings that every run has. A component's own settings sit beside the component."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.ranges import above_zero, at_least, check_num_workers
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, component, option

logger = logging.getLogger(__name__)

LOG_FORMATS = ("auto", "tqdm", "simple", "json", "none")


@dataclass
class CommonConfig(ScalerunDataclass):
    """Device, precision, seed, logs."""

    seed: int = option(1, "seed of weights, data order and dropout")
    cpu: bool = option(False, "use the CPU even where a GPU is present")
    fp16: bool = option(False, "compute in half precision with dynamic loss scaling")
    bf16: bool = option(False, "compute in bfloat16; weights and optimizer stay in float32")
    fp16_init_scale: float = option(4.0, "first loss scale")
    fp16_scale_window: int = option(256, "updates without overflow before the loss scale doubles")
    fp16_scale_tolerance: float = option(0.0, "share of overflows tolerated before it halves")
    min_loss_scale: float = option(2.0**-5, "loss scale below which training stops")
    compile: bool = option(False, "compile each block with torch.compile")
    log_interval: int = option(100, "updates between training records")
    log_format: str = option("auto", "how progress is shown", choices=LOG_FORMATS)
    log_file: str | None = option(None, "also write the text log to this file")
    tensorboard_logdir: str | None = option(None, "write TensorBoard event files to this folder")
    wandb_project: str | None = option(None, "log to this Weights & Biases project")
    aim_repo: str | None = option(None, "log to this Aim repository")
    user_dir: str | None = option(None, "folder with plug-in code to import before parsing")
    profile: bool = option(False, "profile a few updates and write a trace to the run folder")
    profile_updates: list[int] = option([6, 9], "first and last update that --profile records")
    nonfinite: str = option(
        "stop", "what to do with a loss or gradient that is not finite", choices=("stop", "skip")
    )
    nonfinite_limit: int = option(20, "skipped updates in a row after which --nonfinite skip stops")

    def validate(self) -> None:
        if self.fp16 and self.bf16:
            raise ConfigError("--fp16 and --bf16 exclude each other; give one of them")
        at_least("--seed", self.seed, 0)
        at_least("--log-interval", self.log_interval, 1)
        above_zero("--fp16-init-scale", self.fp16_init_scale)
        above_zero("--min-loss-scale", self.min_loss_scale)
        at_least("--fp16-scale-window", self.fp16_scale_window, 1)
        at_least("--nonfinite-limit", self.nonfinite_limit, 1)
        if not 0 <= self.fp16_scale_tolerance < 1:
            raise ConfigError(
                f"--fp16-scale-tolerance is {self.fp16_scale_tolerance:g}; give a share from 0 to 1"
            )
        if (
            len(self.profile_updates) != 2
            or not 1 <= self.profile_updates[0] <= self.profile_updates[1]
        ):
            raise ConfigError(
                f"--profile-updates is {self.profile_updates}; give two update numbers, as in 6,9"
            )


@dataclass
class DistributedConfig(ScalerunDataclass):
    """How many processes train together, and what each of them holds.

    But for rounding none of it changes what is learned: a run may go on with other values.
    """

    distributed_world_size: int | None = option(
        None, "processes; the command starts them unless a launcher did (default: the launcher's)"
    )
    distributed_port: int = option(
        0, "port of the first host by which processes find each other under Slurm; 0: from the job"
    )
    distributed_timeout_seconds: int = option(
        600, "seconds to wait for the other processes before the run ends with an error"
    )
    ddp_backend: str = option(
        "fully_sharded",
        "parameters, gradients and optimizer state of the data-parallel ranks: sharded (FSDP) or "
        "whole copies; fairscale shards with the library of that name, on GPUs; none for a single "
        "data-parallel rank",
        choices=("fully_sharded", "pytorch_ddp", "fairscale", "none"),
    )
    replicate_size: int = option(
        1, "copies of the model, each sharded over the rest of the data-parallel ranks (HSDP)"
    )
    model_parallel_size: int = option(
        1, "ranks that share each matrix product", aliases=("--tensor-parallel-size",)
    )
    sequence_parallel: bool = option(
        False, "between the shared matrix products spread the tokens over the same ranks"
    )
    expert_parallel_size: int = option(1, "data-parallel ranks that the experts are spread over")
    seq_parallel_size: int = option(
        1, "data-parallel ranks that share each sequence (dilated attention)"
    )
    no_reshard_after_forward: bool = option(
        False, "keep gathered parameters until backward: faster, more memory"
    )
    gather_in_half: bool = option(
        False,
        "gather sharded blocks in the type that products are computed in: half the traffic and "
        "memory, and the gains and biases of their norms are rounded too",
    )
    cpu_offload: bool = option(False, "keep sharded parameters and optimizer state on the host")
    deterministic_reduce: bool = option(
        False,
        "add gradients in an order that does not depend on the number of data-parallel ranks: "
        "equal bits for equal batches, at the price of speed",
    )

    def validate(self) -> None:
        if self.distributed_world_size is not None:
            at_least("--distributed-world-size", self.distributed_world_size, 1)
        if not 0 <= self.distributed_port < 2**16:
            raise ConfigError(
                f"--distributed-port is {self.distributed_port}; give a port from 1 to 65535, or 0"
            )
        for flag, value in (
            ("--distributed-timeout-seconds", self.distributed_timeout_seconds),
            ("--replicate-size", self.replicate_size),
            ("--model-parallel-size", self.model_parallel_size),
            ("--expert-parallel-size", self.expert_parallel_size),
            ("--seq-parallel-size", self.seq_parallel_size),
        ):
            at_least(flag, value, 1)
        if self.sequence_parallel and self.model_parallel_size == 1:
            raise ConfigError("--sequence-parallel has no effect without --model-parallel-size")
        if self.ddp_backend == "fairscale":
            self._check_fairscale()
        elif self.ddp_backend != "fully_sharded":
            for flag, given in (
                ("--replicate-size", self.replicate_size != 1),
                ("--no-reshard-after-forward", self.no_reshard_after_forward),
                ("--gather-in-half", self.gather_in_half),
                ("--cpu-offload", self.cpu_offload),
            ):
                if given:
                    raise ConfigError(
                        f"{flag} has no effect with --ddp-backend {self.ddp_backend}; give "
                        "fully_sharded, or leave it out"
                    )

    def _check_fairscale(self) -> None:
        for flag, given in (
            ("--replicate-size", self.replicate_size != 1),
            ("--model-parallel-size", self.model_parallel_size != 1),
            ("--expert-parallel-size", self.expert_parallel_size != 1),
            ("--seq-parallel-size", self.seq_parallel_size != 1),
            ("--gather-in-half", self.gather_in_half),
            ("--cpu-offload", self.cpu_offload),
            ("--deterministic-reduce", self.deterministic_reduce),
        ):
            if given:
                raise ConfigError(
                    f"{flag} does not go with --ddp-backend fairscale; give fully_sharded, or "
                    "leave it out"
                )


@dataclass
class DatasetConfig(ScalerunDataclass):
    """How sequences become batches."""

    batch_size: int | None = option(
        None, "sequences in a batch on each data-parallel rank", aliases=("--max-sentences",)
    )
    batch_size_valid: int | None = option(
        None,
        "sequences in a validation batch (default: --batch-size)",
        aliases=("--max-sentences-valid",),
    )
    max_tokens: int | None = option(
        None,
        "tokens in a batch on each data-parallel rank, padding included, of sequences of similar "
        "length; for tasks whose sequences have lengths of their own",
    )
    max_tokens_valid: int | None = option(
        None, "tokens in a validation batch (default: --max-tokens)"
    )
    required_batch_size_multiple: int | None = option(
        None,
        "where --max-tokens allows more sequences than this, their number is a multiple of it "
        "(default: 8)",
    )
    num_workers: int = option(0, "processes that prepare batches; 0 prepares them in the main one")
    data_buffer_size: int = option(10, "batches that each worker prepares ahead")
    train_subset: str = option("train", "folder below DATA to train on")
    valid_subset: list[str] = option(
        ["valid"], "folders below DATA to validate on; a folder of sets stands for all of them"
    )
    validate_interval: int = option(1, "epochs between validations; 0 for none at epoch ends")
    validate_interval_updates: int = option(0, "updates between validations; 0 for none")
    validate_after_updates: int = option(0, "no validation before this update")
    disable_validation: bool = option(False, "never validate")
    max_valid_steps: int | None = option(None, "validate on at most this many batches of each set")
    skip_batches: list[str] = option([], "updates whose data is thrown away, such as 100-200,350")

    def validate(self) -> None:
        if not self.valid_subset:
            raise ConfigError("--valid-subset is empty; name a set, or give --disable-validation")
        above_zero("--batch-size", self.batch_size)
        above_zero("--batch-size-valid", self.batch_size_valid)
        above_zero("--max-tokens", self.max_tokens)
        above_zero("--max-tokens-valid", self.max_tokens_valid)
        above_zero("--required-batch-size-multiple", self.required_batch_size_multiple)
        check_num_workers(self.num_workers)
        at_least("--data-buffer-size", self.data_buffer_size, 1)
        at_least("--validate-interval", self.validate_interval, 0)
        at_least("--validate-interval-updates", self.validate_interval_updates, 0)
        at_least("--validate-after-updates", self.validate_after_updates, 0)
        above_zero("--max-valid-steps", self.max_valid_steps)
        self.skipped_ranges()

    def skipped_ranges(self) -> list[tuple[int, int]]:
        """``--skip-batches`` as (first, last) update numbers, both included."""
        ranges = []
        for entry in self.skip_batches:
            first, dash, last = entry.partition("-")
            bounds = (first, last if dash else first)
            if not all(bound.isascii() and bound.isdigit() for bound in bounds):
                raise ConfigError(
                    f"--skip-batches has {entry!r}; give numbers or ranges, as in 100-200,350"
                )
            low, high = int(bounds[0]), int(bounds[1])
            if not 1 <= low <= high:
                raise ConfigError(f"--skip-batches has {entry!r}, which is an empty range")
            ranges.append((low, high))
        return ranges


@dataclass
class OptimizationConfig(ScalerunDataclass):
    """When to stop, and what one update is made of."""

    max_update: int = option(0, "updates after which training ends; 0 for no limit")
    max_epoch: int = option(0, "passes over the data after which training ends; 0 for no limit")
    stop_time_hours: float = option(0.0, "hours of training after which it ends; 0 for no limit")
    stop_min_lr: float = option(-1.0, "end once the learning rate is at or below this; -1: never")
    patience: int = option(
        -1, "end after this many validations without a better checkpoint metric; -1: never"
    )
    update_freq: list[int] = option(
        [1], "batches per update; a list gives one value for each epoch, the last repeats"
    )
    freeze_params: list[str] = option(
        [], "name patterns of parameters that are not trained, such as *embed*"
    )
    clip_norm: float = option(0.0, "largest gradient norm; 0 reports the norm and does not clip")
    clip_norm_type: str = option(
        "l2",
        "which norm --clip-norm limits: l2, the largest absolute value, or SparseClip's, in which "
        "the gradients of E experts count 1/sqrt(E)",
        choices=("l2", "inf", "sparse"),
    )

    def validate(self) -> None:
        at_least("--max-update", self.max_update, 0)
        at_least("--max-epoch", self.max_epoch, 0)
        at_least("--stop-time-hours", self.stop_time_hours, 0)
        at_least("--clip-norm", self.clip_norm, 0)
        if self.patience != -1:
            at_least("--patience", self.patience, 1)
        if not self.update_freq or min(self.update_freq) < 1:
            raise ConfigError(f"--update-freq is {self.update_freq}; give whole numbers from 1")

    def update_freq_at(self, epoch: int) -> int:
        """Batches per update in an epoch (from 1)."""
        return self.update_freq[min(epoch, len(self.update_freq)) - 1]


@dataclass
class CheckpointConfig(ScalerunDataclass):
    """Where a run lives, when it is saved, what is kept."""

    save_dir: str = option("checkpoints", "the run folder")
    restore_file: str | None = option(
        None, "checkpoint or run folder to start from when the run folder has none of its own"
    )
    finetune_from_model: str | None = option(
        None, "checkpoint or run folder to take the weights from, and nothing else, for a new run"
    )
    reset_optimizer: bool = option(False, "do not load the optimizer's state")
    reset_lr_scheduler: bool = option(False, "do not load the schedule's state and update count")
    reset_meters: bool = option(False, "do not load statistics and the best metric")
    reset_dataloader: bool = option(False, "start from the first sequence of the first epoch")
    save_interval: int = option(
        1,
        "epochs between checkpoints; 0 for none at epoch ends",
        aliases=("--save-interval-epochs",),
    )
    save_interval_updates: int = option(0, "updates between checkpoints; 0 for none")
    keep_last_updates: int = option(
        -1,
        "newest --save-interval-updates checkpoints to keep; -1 keeps all",
        aliases=("--keep-interval-updates",),
    )
    keep_last_epochs: int = option(-1, "newest epoch-end checkpoints to keep; -1 keeps all")
    keep_best_checkpoints: int = option(-1, "best checkpoints to keep; -1 keeps only the best")
    no_epoch_checkpoints: bool = option(False, "save no checkpoints at epoch ends")
    no_save: bool = option(False, "save no checkpoints at all")
    best_checkpoint_metric: str = option(
        "loss",
        "validation metric that marks the best checkpoint",
        choices=("loss", "ppl", "bits_per_byte", "bleu", "chrf"),
    )
    best_checkpoint_subset: str | None = option(
        None, "validation set of that metric (default: the first)"
    )
    maximize_best_checkpoint_metric: bool = option(False, "larger is better for that metric")
    save_async: bool = option(
        True,
        "copy the state and write it in the background",
        aliases=("--write-checkpoints-asynchronously",),
    )

    def validate(self) -> None:
        at_least("--save-interval", self.save_interval, 0)
        at_least("--save-interval-updates", self.save_interval_updates, 0)
        for flag, value in (
            ("--keep-last-updates", self.keep_last_updates),
            ("--keep-last-epochs", self.keep_last_epochs),
            ("--keep-best-checkpoints", self.keep_best_checkpoints),
        ):
            if value != -1:
                at_least(flag, value, 0)
        if not self.save_dir:
            raise ConfigError("--save-dir is empty; name the run folder")


@dataclass
class EMAConfig(ScalerunDataclass):
    """An exponential moving average of the weights."""

    store_ema: bool = option(False, "keep an exponential moving average of the weights")
    ema_decay: float = option(0.9999, "share of the average kept at each step")
    ema_start_update: int = option(0, "until this update the average equals the weights")
    ema_update_freq: int = option(1, "updates between two steps of the average")

    def validate(self) -> None:
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(f"--ema-decay is {self.ema_decay:g}; give a number from 0 to below 1")
        at_least("--ema-start-update", self.ema_start_update, 0)
        at_least("--ema-update-freq", self.ema_update_freq, 1)


@dataclass
class ScalerunConfig(ScalerunDataclass):
    """Everything that ``scalerun.cli.train`` can be told."""

    common: CommonConfig = field(default_factory=CommonConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    task: ScalerunDataclass = component("--task", "what to train on and for")
    model: ScalerunDataclass = component("--arch", "architecture preset")
    criterion: ScalerunDataclass = component("--criterion", "loss", default="cross_entropy")
    optimizer: ScalerunDataclass = component("--optimizer", "optimizer", default="adam")
    lr_scheduler: ScalerunDataclass = component(
        "--lr-scheduler", "learning-rate schedule", default="cosine"
    )

    def validate(self) -> None:
        common, dataset, ckpt = self.common, self.dataset, self.checkpoint
        if dataset.batch_size is None and dataset.max_tokens is None:
            raise ConfigError("--batch-size is required: the number of sequences in a batch")
        opt = self.optimization
        if not (opt.max_update or opt.max_epoch or opt.stop_time_hours or opt.patience > 0):
            raise ConfigError(
                "training would never end: give --max-update, --max-epoch, --stop-time-hours "
                "or --patience"
            )
        if opt.patience > 0 and dataset.disable_validation:
            raise ConfigError("--patience needs validation, which --disable-validation turns off")
        if common.log_file is not None and common.log_format == "none":
            raise ConfigError("--log-file has nothing to write with --log-format none")
        resets = [
            f"--{n.replace('_', '-')}" for n, on in vars(ckpt).items() if "reset_" in n and on
        ]
        if ckpt.finetune_from_model is not None and (resets or ckpt.restore_file is not None):
            other = resets[0] if resets else "--restore-file"
            raise ConfigError(
                f"--finetune-from-model takes weights alone, and {other} chooses what else to take "
                "from another run; give one of them"
            )
        if resets == ["--reset-dataloader"] and ckpt.restore_file is None:
            logger.warning("--reset-dataloader resets nothing without --restore-file")
        elif resets and ckpt.restore_file is None:
            raise ConfigError(f"{resets[0]} says what not to load from --restore-file; give both")
        if self.distributed.gather_in_half and not (common.bf16 or common.fp16):
            raise ConfigError("--gather-in-half has no effect without --bf16 or --fp16; add one")
        if ckpt.no_save and ckpt.save_interval_updates:
            raise ConfigError("--no-save and --save-interval-updates contradict each other")
