"""A run folder or checkpoint -> a model that can be asked."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scalerun.checkpoint.checkpoint_manager import (
    find_checkpoint,
    load_tensors,
    read_state,
    run_file,
)
from scalerun.cli.registries import CHOOSERS
from scalerun.data.length_batches import train_limits, valid_limits
from scalerun.dataclass.configs import ScalerunConfig
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.parser import config_from_dict
from scalerun.distributed.mesh import ONE_RANK, ModelMeshes
from scalerun.models.base_model import BaseModel, build_model
from scalerun.plugins import load_plugins, plugin_errors
from scalerun.tasks.base_task import TASK_REGISTRY, BaseTask, setup_task

CONFIG_FILE = "config.json"
ASSETS_FOLDER = "assets"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class LoadedRun:
    """A checkpoint, ready to be evaluated or to generate."""

    checkpoint: Path
    cfg: ScalerunConfig
    task: BaseTask
    model: BaseModel
    num_updates: int


@plugin_errors()
def load_for_inference(
    path: str | None,
    *,
    device: torch.device,
    use_ema: bool = False,
    data: str | None = None,
    user_dir: str | None = None,
    meshes: ModelMeshes = ONE_RANK,
) -> LoadedRun:
    """Load a checkpoint's model, in evaluation mode, with the task it was trained for.

    Args:
        path: a run folder (its newest good checkpoint is taken) or a checkpoint folder.
        use_ema: take the averaged weights.
        data: data folder in place of the one that the run was trained on.
        user_dir: plug-in folder in place of the one that the run used.
        meshes: axes that share the model; each of their ranks loads its part.

    Raises:
        UserError: there is no checkpoint, it is damaged, or it has no averaged weights.
    """
    if path is None:
        raise ConfigError("--path is required: a run folder or a checkpoint folder")
    checkpoint = find_checkpoint(Path(path))
    cfg = stored_config(checkpoint, user_dir)
    if cfg.task is None:
        raise UserError(
            f"checkpoint {checkpoint} was converted without a tokenizer, so there is no text it "
            "could read or write; convert it with --tokenizer, or load it in Python with "
            "scalerun.cli.inference.load_model"
        )
    task_class = TASK_REGISTRY.class_for(cfg.task)
    cfg.task = task_class.with_assets(cfg.task, checkpoint / ASSETS_FOLDER)
    if data is not None:
        if not hasattr(cfg.task, "data"):
            raise ConfigError(f"--task {cfg.task._name} reads no DATA; {data!r} was given")
        cfg.task = cfg.task.replace(data=data)
    task = setup_task(
        cfg.task,
        seed=cfg.common.seed,
        cache_dir=_cache_dir(checkpoint.parent),
        quarantine=Path(os.devnull),
    )
    task.set_batch_limits(train=train_limits(cfg.dataset), valid=valid_limits(cfg.dataset))
    model = task.build_model(cfg.model, seed=cfg.common.seed, device=device, meshes=meshes)
    state = read_state(checkpoint)
    _load_weights(checkpoint, model, state, use_ema=use_ema)
    return LoadedRun(checkpoint, cfg, task, model.eval(), state["trainer"]["num_updates"])


@plugin_errors()
def load_model(
    path: str | Path,
    *,
    device: torch.device = CPU,
    padding_idx: int | None = None,
    user_dir: str | None = None,
) -> BaseModel:
    """Load a checkpoint's model alone, in evaluation mode, also where there is no task for it.

    Args:
        path: a run folder (its newest good checkpoint is taken) or a checkpoint folder.
        padding_idx: number of the padding symbol, for models that hide it by themselves.
        user_dir: plug-in folder in place of the one that the run used.

    Raises:
        UserError: there is no checkpoint, or it is damaged.
    """
    checkpoint = find_checkpoint(Path(path), "path")
    cfg = stored_config(checkpoint, user_dir)
    state = read_state(checkpoint)
    size = state["task"]["vocabulary_size"]
    source_size = state["task"].get("source_vocabulary_size", size)
    source = {} if source_size == size else {"source_vocab_size": source_size}
    model = build_model(
        cfg.model,
        vocab_size=size,
        padding_idx=padding_idx,
        seed=cfg.common.seed,
        device=device,
        **source,
    )
    _load_weights(checkpoint, model, state, use_ema=False)
    return model.eval()


def stored_config(checkpoint: Path, user_dir: str | None) -> ScalerunConfig:
    """The settings of a checkpoint's run, with its plug-ins loaded."""
    content = json.loads(run_file(checkpoint, CONFIG_FILE).read_text(encoding="utf-8"))
    load_plugins(user_dir or content.get("common", {}).get("user_dir"))
    return config_from_dict(ScalerunConfig, content, choosers=CHOOSERS)


def _cache_dir(run_folder: Path) -> Path:
    """The run's own cache of prepared data, or a temporary one where that cannot be written."""
    if os.access(run_folder, os.W_OK):
        return run_folder / "cache"
    temporary = tempfile.mkdtemp(prefix="scalerun-cache-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


def _load_weights(
    checkpoint: Path, model: BaseModel, state: dict[str, Any], *, use_ema: bool
) -> None:
    load_tensors(checkpoint, {"model": model.state_dict()})
    if not use_ema:
        return
    if "ema" not in state:
        raise UserError(
            f"checkpoint {checkpoint} has no averaged weights: the run had no --store-ema; leave "
            "--use-ema out"
        )
    load_tensors(checkpoint, {"ema": dict(model.named_parameters())})
