"""A converted model becomes a run folder, whose checkpoint is read back before it counts."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from scalerun.checkpoint.checkpoint_manager import CheckpointManager, find_checkpoint
from scalerun.cli.assembly import run_files
from scalerun.cli.converted_task import criterion_for
from scalerun.cli.inference import load_model
from scalerun.cli.registries import CHOOSERS
from scalerun.cli.run_folder import RunFolder
from scalerun.dataclass.configs import CheckpointConfig, ScalerunConfig
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.parser import config_from_dict
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.models.base_model import Architecture, BaseModel
from scalerun.models.beit3 import BEiT3
from scalerun.models.encoder_decoder import EncoderDecoder
from scalerun.models.transformer_encoder import TransformerEncoder
from scalerun.models.translation import Translation
from scalerun.modules.moe.moe_layer import MoELayer
from scalerun.tasks.base_task import BaseTask, UnknownVocabulary, setup_task
from scalerun.tasks.streaming_language_modeling import StreamingLanguageModelingConfig
from scalerun.trainer import Progress

logger = logging.getLogger(__name__)

TASK = "streaming_language_modeling"
SOURCE_FILE = "converted_from.json"
LONGEST_SAMPLE = 1024
PROBE_LENGTH = 16


@dataclass(frozen=True)
class ConvertedModel:
    """What goes into the run folder."""

    model: BaseModel
    cfg: ScalerunDataclass
    arch: str
    vocab_size: int
    source: dict[str, Any]
    """Where the weights come from, as JSON values."""
    source_vocab_size: int | None = None
    """Where an encoder-decoder has two vocabularies."""

    @classmethod
    def of(cls, translation: Translation, source: dict[str, Any]) -> Self:
        """The model of another library's weights; ``source`` says where they come from."""
        return cls(
            model=translation.build(),
            cfg=translation.cfg,
            arch=translation.arch,
            vocab_size=translation.vocab_size,
            source=source,
            source_vocab_size=translation.source_vocab_size,
        )


def write_run(
    converted: ConvertedModel,
    output: Path,
    *,
    vocabulary: Mapping[str, Any] | None,
    words: list[str],
    task: ScalerunDataclass | None = None,
    gate: Callable[[BaseModel], None] = lambda model: None,
) -> Path:
    """Write ``checkpoint_0`` of a new run folder, and compare it with the model.

    It has the model and what it depends on, and nothing of a training: no optimizer, no schedule,
    no place in the data.

    Args:
        output: a folder that is empty or not there.
        vocabulary: settings of a language model's task that name its tokenizer; None for a run
            without a task.
        words: the command's arguments.
        task: settings of the task, where it is not that of a language model.
        gate: called with the model that was read back; an error takes the folder away.

    Raises:
        UserError: the folder cannot be written, or the checkpoint gives other logits.
    """
    cfg = run_config(converted, vocabulary, task)
    served = None
    if cfg.task is not None:
        served = setup_task(
            cfg.task, seed=cfg.common.seed, cache_dir=output / "cache", quarantine=Path(os.devnull)
        )
    with RunFolder(output, flag="--output") as folder:
        files = run_files(cfg, served) | {
            SOURCE_FILE: json.dumps(converted.source, indent=1) + "\n"
        }
        with CheckpointManager(CheckpointConfig(save_dir=str(output)), run_files=files) as manager:
            manager.save(0, state_of(converted, cfg, served), final=True)
        checkpoint = find_checkpoint(output, "--output")
        try:
            loaded = load_model(checkpoint)
            compare(converted.model, loaded)
            gate(loaded)
        except UserError:
            shutil.rmtree(output)
            raise
        folder.write_description(cfg, words, command="scalerun.cli.convert")
    return checkpoint


def report_run(checkpoint: Path, converted: ConvertedModel) -> None:
    """Say what was written, once it has been compared."""
    num_params = sum(parameter.numel() for parameter in converted.model.parameters())
    logger.info(
        "%s: %s, %s parameters; read back, its logits are the same",
        checkpoint,
        converted.arch,
        f"{num_params:,}",
    )


def run_config(
    converted: ConvertedModel,
    vocabulary: Mapping[str, Any] | None,
    task: ScalerunDataclass | None = None,
) -> ScalerunConfig:
    """The settings of a run that would continue with this model; without a tokenizer no task."""
    chosen = {
        name: {"_name": default}
        for name, default in (
            ("criterion", criterion_for(task, has_experts=has_experts(converted.model))),
            ("optimizer", "adam"),
            ("lr_scheduler", "cosine"),
        )
    }
    cfg = config_from_dict(ScalerunConfig, chosen, choosers=CHOOSERS)
    cfg.model = converted.cfg.named(converted.arch)
    if task is not None:
        cfg.task = task
    elif vocabulary is not None:
        positions = converted.model.max_positions() or LONGEST_SAMPLE
        cfg.task = StreamingLanguageModelingConfig(
            **vocabulary, tokens_per_sample=min(positions, LONGEST_SAMPLE)
        ).named(TASK)
    return cfg


def has_experts(model: BaseModel) -> bool:
    """Whether a model has layers of experts, whose gates have a loss of their own."""
    return any(isinstance(part, MoELayer) for part in model.modules())


def state_of(
    converted: ConvertedModel, cfg: ScalerunConfig, task: BaseTask | None
) -> dict[str, Any]:
    """The parts of a training run that a model alone determines."""
    return {
        "architecture": Architecture(cfg.model),
        "model": converted.model,
        "task": task or UnknownVocabulary(converted.vocab_size, converted.source_vocab_size),
        "trainer": Progress(),
    }


def compare(model: BaseModel, loaded: BaseModel) -> None:
    """Check that two models are the same, weight by weight and in what they compute.

    Raises:
        UserError: they are not.
    """
    expected, found = model.state_dict(), loaded.state_dict()
    for name, tensor in expected.items():
        if not torch.equal(tensor, found[name]):
            raise UserError(f"{name} of the written checkpoint differs from the converted weights")
    logits = []
    for each in (model, loaded):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)  # a gate may draw, also when it evaluates
            logits.append(probe(each.eval()))
    if not torch.equal(*logits):
        raise UserError("the written checkpoint gives other logits than the converted model")


@torch.no_grad()
def probe(model: Any) -> Tensor:
    """What a model computes for a few tokens."""
    numbers = 7 * torch.arange(min(model.max_positions() or PROBE_LENGTH, PROBE_LENGTH))
    stacks = (model.encoder, model.decoder) if isinstance(model, EncoderDecoder) else (model,)
    rows = [stack.embedding.tokens.weight.shape[0] for stack in stacks]
    tokens, *targets = ((numbers % num_rows).unsqueeze(0) for num_rows in rows)
    if isinstance(model, BEiT3):
        vision = model.vision_embedding
        generator = torch.Generator().manual_seed(1)
        size = (1, vision.channels, vision.image_size, vision.image_size)
        return model.encode(tokens, images_BCHW=torch.randn(size, generator=generator)).features
    if isinstance(model, TransformerEncoder):
        output = model(tokens)
        return output.features if output.logits is None else output.logits
    return model(tokens, *targets).logits
