"""scalerun as a peer of a side-by-side harness: its own training step and its own generation.

A harness imports this file as a module of its ``adapters`` package and calls :func:`build` or
:func:`build_gen`. The training step is :meth:`scalerun.trainer.Trainer.train_step`, with the parts
that ``scalerun.cli.train`` would build; what a run has besides (data, checkpoints, validation) is
measured by ``benchmarks/train_command.py``.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from scalerun import __version__
from scalerun.cli.registries import CHOOSERS
from scalerun.criterions.base_criterion import build_criterion
from scalerun.data.batch import Batch
from scalerun.dataclass.configs import ScalerunConfig
from scalerun.dataclass.parser import parse_config
from scalerun.distributed.precision import choose_precision
from scalerun.distributed.stop_signal import StopSignal
from scalerun.logging.profiler import UpdateProfiler
from scalerun.logging.throughput import Throughput
from scalerun.models.base_decoder import BaseDecoder
from scalerun.models.base_model import build_model
from scalerun.optim.base_optimizer import build_optimizer
from scalerun.optim.lr_scheduler.base_lr_scheduler import build_lr_scheduler
from scalerun.plugins import load_plugins
from scalerun.tasks.base_task import BaseTask
from scalerun.trainer import Trainer
from scalerun.trainer_parts import TrainerParts

NOTES = "Trainer.train_step of transformer_lm (pre-LN, gelu, learned positions, tied embeddings)"
SEED = 1


class Shape(Protocol):
    """What of a harness's shape is read."""

    batch: int
    vocab: int
    dim: int
    layers: int
    heads: int
    ffn: int
    seq: int
    prompt: int
    new_tokens: int
    experts: int
    moe_freq: int
    segments: tuple[int, ...]


class GivenTokens(BaseTask):
    """Only the step of a task: the tokens come from outside."""

    @classmethod
    def setup_task(cls, cfg: Any, *, seed: int, cache_dir: Path, quarantine: Path) -> GivenTokens:
        return cls(cfg)

    def read_dataset(self, split: str, *, training: bool) -> Any:
        raise NotImplementedError

    def valid_subsets(self, names: Any) -> list[str]:
        return []


def versions() -> dict[str, str]:
    """What is measured."""
    return {
        "scalerun": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def build(
    shape: Shape, dtype: str = "fp32", *, flags: Sequence[str] = ()
) -> tuple[torch.nn.Module, Callable[[Tensor], float]]:
    """A model and one whole update on given tokens (batch, seq + 1): returns the mean loss, nats.

    Args:
        flags: further flags of ``scalerun.cli.train``.

    Raises:
        NotImplementedError: the shape has sparse attention.
    """
    trainer = build_trainer(shape, dtype, flags)

    def step(tokens: Tensor) -> float:
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        rows = list(range(tokens.shape[0]))
        trainer.train_step([Batch(inputs, targets, targets.numel(), rows)])
        loss: float = trainer.metrics.flush(trainer.num_updates)["loss"]
        return loss * math.log(2)

    return trainer.model, step


def build_gen(
    shape: Shape, dtype: str = "fp32"
) -> tuple[torch.nn.Module, Callable[[Tensor], Tensor]]:
    """A model and greedy decoding with its own cache: prompts (batch, n) -> (batch, n + new)."""
    cfg = parse(shape, dtype)
    device = torch.device("cpu")
    model = build_model(
        cfg.model, vocab_size=shape.vocab, padding_idx=None, seed=SEED, device=device
    ).eval()
    assert isinstance(model, BaseDecoder)
    precision = choose_precision(fp16=False, bf16=cfg.common.bf16, device=device)

    @torch.inference_mode()
    def generate(prompts: Tensor) -> Tensor:
        batch_size, length = prompts.shape
        state = model.init_incremental_state(batch_size, length + shape.new_tokens)
        pieces, new = [prompts], prompts
        with precision.autocast():
            for _ in range(shape.new_tokens):
                output = model(new, incremental_state=state, last_token_only=True)
                new = output.logits[:, -1].max(-1, keepdim=True).indices
                pieces.append(new)
        return torch.cat(pieces, dim=1)

    return model, generate


def model_flags(shape: Shape) -> list[str]:
    """The flags of ``scalerun.cli.train`` that give a shape's model.

    Raises:
        NotImplementedError: the shape has sparse attention.
    """
    if shape.segments:
        raise NotImplementedError("scalerun has no sparse attention yet")
    return [
        *(expert_flags(shape) if shape.experts else []),
        *("--arch", "transformer_lm", "--decoder-learned-pos"),
        "--share-decoder-input-output-embed",
        *("--decoder-embed-dim", str(shape.dim), "--decoder-layers", str(shape.layers)),
        *("--decoder-attention-heads", str(shape.heads)),
        *("--decoder-ffn-embed-dim", str(shape.ffn)),
        *("--max-target-positions", str(max(shape.seq, shape.prompt + shape.new_tokens))),
        *("--tokens-per-sample", str(shape.seq), "--batch-size", str(shape.batch)),
    ]


def expert_flags(shape: Shape) -> list[str]:
    """The flags for experts; with a norm inside each, as the harness's other library has it."""
    return [
        *("--moe-freq", str(shape.moe_freq), "--moe-expert-count", str(shape.experts)),
        *("--use-xmoe", "--subln", "--criterion", "moe_cross_entropy"),
    ]


def optimizer_flags() -> list[str]:
    """The flags that give the harness's optimizer: AdamW at a constant rate, clipped at norm 1."""
    return [
        *("--optimizer", "adam", "--adam-betas", "0.9,0.95", "--weight-decay", "0.1"),
        *("--lr-scheduler", "constant", "--lr", "3e-4", "--clip-norm", "1.0"),
    ]


def parse(shape: Shape, dtype: str, flags: Sequence[str] = ()) -> ScalerunConfig:
    """The configuration of a run of this shape."""
    words = ["unused", *model_flags(shape), *optimizer_flags(), "--seed", str(SEED)]
    words += ["--task", "streaming_language_modeling", "--tokenizer", "bytes", "--max-update", "1"]
    words += ["--cpu", "--bf16"] if dtype == "bf16" else ["--cpu"]
    words += flags
    return parse_config(
        ScalerunConfig, words, prog="benchmark", choosers=CHOOSERS, load_plugins=load_plugins
    )


def build_trainer(shape: Shape, dtype: str, flags: Sequence[str]) -> Trainer:
    """A Trainer whose step can be called; it has neither data nor a place to save to."""
    cfg = parse(shape, dtype, flags)
    device = torch.device("cpu")
    model = build_model(
        cfg.model, vocab_size=shape.vocab, padding_idx=None, seed=SEED, device=device
    )
    optimizer = build_optimizer(cfg.optimizer, model.named_parameters())
    absent = cast(Any, None)
    parts = TrainerParts(
        task=GivenTokens(cfg.task),
        model=model,
        criterion=build_criterion(cfg.criterion),
        optimizer=optimizer,
        lr_scheduler=build_lr_scheduler(
            cfg.lr_scheduler, optimizer, max_update=cfg.optimization.max_update
        ),
        loader=absent,
        checkpoints=absent,
        sinks=absent,
        throughput=Throughput(device),
        precision=choose_precision(fp16=False, bf16=cfg.common.bf16, device=device),
        loss_scaler=None,
        ema=None,
        profiler=UpdateProfiler(Path(), None, device=device),
        valid_subsets=[],
    )
    trainer = Trainer(cfg, parts, StopSignal())
    trainer.lr_scheduler.step_update(0)
    return trainer
