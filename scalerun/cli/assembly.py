"""Builds the parts of a training run from its configuration, for the Trainer."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from scalerun.checkpoint.checkpoint_manager import CheckpointManager
from scalerun.cli.inference import ASSETS_FOLDER, CONFIG_FILE
from scalerun.criterions.base_criterion import build_criterion
from scalerun.data.length_batches import train_limits, valid_limits
from scalerun.data.loader import BatchLoader
from scalerun.dataclass.configs import CheckpointConfig, ScalerunConfig
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.distributed.launch import choose_device
from scalerun.distributed.parallelize import check_backend, gradient_sum, parallelize, wrap_built
from scalerun.distributed.precision import Precision, choose_precision
from scalerun.distributed.ranks import ALONE, Ranks
from scalerun.logging.base_sink import BaseSink
from scalerun.logging.profiler import UpdateProfiler
from scalerun.logging.sinks import SinkGroup, build_sinks, check_trackers
from scalerun.logging.throughput import Throughput, measure_matmul_rate
from scalerun.logging.translation_scores import SCORES
from scalerun.models.base_model import BaseModel
from scalerun.models.memory_config import MemoryConfig
from scalerun.optim.base_optimizer import build_optimizer
from scalerun.optim.clip import check_norm_type
from scalerun.optim.ema import EMA
from scalerun.optim.loss_scaler import DynamicLossScaler
from scalerun.optim.lr_scheduler.base_lr_scheduler import build_lr_scheduler
from scalerun.optim.param_groups import freeze
from scalerun.plugins import plugin_errors
from scalerun.tasks.base_task import BaseTask, setup_task
from scalerun.trainer_parts import TrainerParts

logger = logging.getLogger(__name__)

PATHS = {"common": ("user_dir",), "task": ("data", "cache_dir", "vocabulary")}
"""Settings that name folders, which a checkpoint's user may look for from anywhere."""


@plugin_errors()
def build_parts(cfg: ScalerunConfig, save_dir: Path, ranks: Ranks = ALONE) -> TrainerParts:
    """Build everything that the Trainer puts to work; every rank calls it.

    What reads text comes late: whatever else is wrong is said before hours of tokenising.
    """
    check_trackers(cfg.common)
    device = choose_device(cpu=cfg.common.cpu, local_rank=ranks.local_rank)
    refuse_wrappers(cfg, device)
    precision = choose_precision(fp16=cfg.common.fp16, bf16=cfg.common.bf16, device=device)
    task = build_task(cfg, save_dir, ranks)
    if isinstance(cfg.model, MemoryConfig):
        cfg.model.check_training(on_cpu=device.type == "cpu", compiled=cfg.common.compile)
    valid_subsets = choose_valid_subsets(cfg, task)
    model = task.build_model(
        cfg.model,
        seed=cfg.common.seed,
        device=device,
        meshes=ranks.model_meshes,
        prepare=lambda model: prepare_model(model, cfg, ranks, precision.dtype),
    )
    gradients = wrap_built(
        model, ranks, cfg.distributed, units=model.shard_units(), device=device
    ) or gradient_sum(model, ranks, cfg.distributed, experts=model.expert_units())
    criterion = build_criterion(cfg.criterion).to(device)
    criterion.check_model(model)
    same_bits = cfg.distributed.deterministic_reduce
    optimizer = build_optimizer(cfg.optimizer, model.named_parameters(), same_bits=same_bits)
    check_norm_type(cfg.optimization.clip_norm_type, optimizer.named_params)  # type: ignore[arg-type]
    lr_scheduler = build_lr_scheduler(
        cfg.lr_scheduler, optimizer, max_update=cfg.optimization.max_update
    )
    loader = build_loader(cfg, task, ranks)
    for subset in valid_subsets:
        task.load_dataset(subset, training=False)  # else its faults would show hours later
    sinks = build_run_sinks(cfg, save_dir) if ranks.is_main else SinkGroup([])
    first, last = cfg.common.profile_updates
    parts = TrainerParts(
        task=task,
        model=model,
        criterion=criterion,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        loader=loader,
        checkpoints=CheckpointManager(
            cfg.checkpoint, run_files=run_files(cfg, task), on_event=sinks.write, ranks=ranks
        ),
        sinks=sinks,
        throughput=build_throughput(task, model, precision, ranks),
        precision=precision,
        loss_scaler=DynamicLossScaler(cfg.common) if precision.needs_loss_scale else None,
        ema=EMA(model.named_parameters(), cfg.ema) if cfg.ema.store_ema else None,
        profiler=UpdateProfiler(
            save_dir, (first, last) if cfg.common.profile else None, device=device
        ),
        valid_subsets=valid_subsets,
        ranks=ranks,
        gradients=gradients,
    )
    describe(cfg, parts)
    return parts


def refuse_wrappers(cfg: ScalerunConfig, device: torch.device) -> None:
    """Refuse a backend that does not work on the device, or not with other flags.

    Raises:
        ConfigError: names the flag.
    """
    memory = cfg.model if isinstance(cfg.model, MemoryConfig) else MemoryConfig()
    others = {
        "--compile": cfg.common.compile,
        "--checkpoint-activations": memory.checkpoint_activations,
        "--offload-activations": memory.offload_activations,
    }
    check_backend(cfg.distributed, device, others=others)


def build_task(cfg: ScalerunConfig, save_dir: Path, ranks: Ranks = ALONE) -> BaseTask:
    """The task of the run, which knows how large batches may be."""
    task = setup_task(
        cfg.task,
        seed=cfg.common.seed,
        cache_dir=save_dir / "cache",
        quarantine=save_dir / "quarantine.jsonl" if ranks.is_main else Path(os.devnull),
    )
    task.set_batch_limits(train=train_limits(cfg.dataset), valid=valid_limits(cfg.dataset))
    return task


def refuse_other_data(parts: TrainerParts) -> None:
    """Stop where a rank finds other data than rank 0; every rank calls it.

    Raises:
        UserError: names the rank and what differs.
    """
    sets = {"training": parts.loader.dataset}
    for subset in parts.valid_subsets:
        sets[subset] = parts.task.load_dataset(subset, training=False)
    for name, dataset in sets.items():
        own = {**dataset.ingredients, f"the {name} set": dataset.fingerprint}
        first, *others = parts.ranks.control.gather(own)
        for rank, other in enumerate(others, start=1):
            for what, value in other.items():
                if first.get(what) != value:
                    raise UserError(
                        f"{what} is not the same on all ranks (rank 0: {first.get(what)}, rank "
                        f"{rank}: {value}); give every host the same files below DATA"
                    )


def prepare_model(model: BaseModel, cfg: ScalerunConfig, ranks: Ranks, dtype: torch.dtype) -> None:
    """Freeze, compile and shard a model that is shapes alone."""
    freeze(model.named_parameters(), cfg.optimization.freeze_params)
    if cfg.common.compile:
        model.compile_blocks()
    units, experts = model.shard_units(), model.expert_units()
    parallelize(model, ranks, cfg.distributed, units=units, experts=experts, dtype=dtype)


def build_run_sinks(cfg: ScalerunConfig, save_dir: Path) -> BaseSink:
    """Where the records of the run go."""
    return build_sinks(
        cfg.common,
        save_dir=save_dir,
        run_config=cfg.to_dict(),
        max_update=cfg.optimization.max_update,
        stop_time_hours=cfg.optimization.stop_time_hours,
    )


def build_loader(cfg: ScalerunConfig, task: BaseTask, ranks: Ranks = ALONE) -> BatchLoader:
    """The loader of the training set."""
    data = cfg.dataset
    return BatchLoader(
        task.load_dataset(data.train_subset, training=True),
        batch_size=data.batch_size or 1,
        update_freq=cfg.optimization.update_freq_at,
        num_workers=data.num_workers,
        buffer_size=data.data_buffer_size,
        data_rank=ranks.data_rank,
        data_size=ranks.data_size,
        max_epoch=cfg.optimization.max_epoch,
    )


def choose_valid_subsets(cfg: ScalerunConfig, task: BaseTask) -> list[str]:
    """The validation sets of the run, and a check of the flags that name one."""
    if cfg.dataset.disable_validation:
        return []
    subsets = task.valid_subsets(cfg.dataset.valid_subset)
    best = cfg.checkpoint.best_checkpoint_subset
    if best is not None and best not in subsets:
        raise ConfigError(
            f"--best-checkpoint-subset {best} is not validated (sets: {', '.join(subsets)})"
        )
    check_metric(cfg.checkpoint, task.score_names())
    if not subsets:
        if cfg.optimization.patience > 0:
            raise ConfigError("--patience needs a validation set, and the data has none")
        logger.info("the data has no validation set; nothing will be validated")
    return subsets


def check_metric(cfg: CheckpointConfig, scores: Sequence[str]) -> None:
    """Refuse a checkpoint metric that validation does not measure, or judges the wrong way.

    Args:
        scores: what it measures besides the loss; of these, larger is better.

    Raises:
        ConfigError: names the flags.
    """
    metric = cfg.best_checkpoint_metric
    if metric not in SCORES:
        return
    if metric not in scores:
        raise ConfigError(
            f"--best-checkpoint-metric {metric} is measured with --task translation and "
            "--eval-bleu alone; add them, or choose loss"
        )
    if not cfg.maximize_best_checkpoint_metric:
        raise ConfigError(
            f"--best-checkpoint-metric {metric} is better where it is larger; add "
            "--maximize-best-checkpoint-metric"
        )


def build_throughput(
    task: BaseTask, model: BaseModel, precision: Precision, ranks: Ranks
) -> Throughput:
    """Counters of tokens and time, with the machine's own matrix-product rate."""
    return Throughput(
        precision.device,
        flops_per_token=task.flops_per_target(model),
        matmul_rate=measure_matmul_rate(precision.device, precision.dtype),
        num_devices=ranks.size,
    )


def run_files(cfg: ScalerunConfig, task: BaseTask | None) -> dict[str, str | Path]:
    """Files that make a checkpoint complete in itself.

    Args:
        task: None for a model that no task serves.
    """
    content = cfg.to_dict()
    if task is not None:
        content["task"] = task.cfg.to_dict()  # with what it has found out
    for section, names in PATHS.items():
        for name in names:
            value = (content[section] or {}).get(name)
            if isinstance(value, str) and value and Path(value).expanduser().exists():
                content[section][name] = str(Path(value).expanduser().absolute())
    files: dict[str, str | Path] = {CONFIG_FILE: json.dumps(content, indent=1)}
    assets = {} if task is None else task.assets()
    files.update({f"{ASSETS_FOLDER}/{name}": path for name, path in assets.items()})
    return files


def describe(cfg: ScalerunConfig, parts: TrainerParts) -> None:
    """Say what is about to be trained."""
    num_params = sum(parameter.numel() for parameter in parts.model.parameters())
    precision = parts.precision
    logger.info(
        "%s, %s: %s parameters, %s on %s with %d threads%s",
        cfg.task._name,
        cfg.model._name,
        f"{num_params:,}",
        str(precision.dtype).removeprefix("torch."),
        precision.device,
        torch.get_num_threads(),
        f", {parts.ranks.dims.describe()}" if parts.ranks.size > 1 else "",
    )
    for sentence in cfg.model.warnings():
        logger.warning(sentence)
