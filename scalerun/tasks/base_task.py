"""BaseTask: what a run trains on, and what one step of it is."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from scalerun.criterions.base_criterion import BaseCriterion, CriterionOutput
from scalerun.data.base_dataset import BaseDataset
from scalerun.data.batch import Batch
from scalerun.data.length_batches import BatchLimits
from scalerun.data.text.layout import TRAIN
from scalerun.data.tokenizers.dictionary import Dictionary
from scalerun.data.tokenizers.tokenizer import BaseTokenizer
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.distributed.mesh import ONE_RANK, ModelMeshes
from scalerun.distributed.ranks import Ranks
from scalerun.models.base_model import BaseModel, build_model
from scalerun.registry import Registry
from scalerun.tasks.base_scorer import BaseScorer

logger = logging.getLogger(__name__)


class BaseTask(ABC):
    """Owns the data, the vocabulary and the meaning of a step.

    Args:
        cfg: the task's settings.

    Attributes:
        dictionary: the vocabulary of the model.
        tokenizer: text to ids and back; None for tasks without text.
        sequence_length: tokens of a full sequence, to estimate what a step costs.
        vocabulary_source: what names the vocabulary, for messages.
        slides_windows: whether text that is scored can be cut into overlapping sequences.
        context_window: tokens that such a sequence repeats from before its targets.
    """

    dictionary: Dictionary
    tokenizer: BaseTokenizer | None = None
    sequence_length: int
    vocabulary_source = "--tokenizer"
    slides_windows: ClassVar[bool] = False
    context_window: int = 0

    def __init__(self, cfg: ScalerunDataclass) -> None:
        self.cfg = cfg
        self._datasets: dict[tuple[str, bool], BaseDataset[Any]] = {}

    @classmethod
    @abstractmethod
    def setup_task(cls, cfg: Any, *, seed: int, cache_dir: Path, quarantine: Path) -> Self:
        """Build the task; the data folder is not looked at yet.

        Args:
            cfg: the task's own configuration.
            seed: seed of the data's order.
            cache_dir: where prepared data is kept unless the configuration names a folder.
            quarantine: file that lists records that were left out.

        Raises:
            UserError: a file of the vocabulary is missing or damaged.
        """

    def set_batch_limits(self, *, train: BatchLimits, valid: BatchLimits) -> None:
        """Say how large batches may be, before the first dataset is read.

        Only tasks whose datasets make whole batches need to know.

        Raises:
            ConfigError: a number of tokens is given, and the task has no use for it.
        """
        if train.max_tokens is not None or valid.max_tokens is not None:
            raise ConfigError(
                f"--max-tokens is for sequences of many lengths, which --task {self.cfg._name} "
                "does not put together by length; give --batch-size alone"
            )

    @abstractmethod
    def read_dataset(self, split: str, *, training: bool) -> BaseDataset[Any]:
        """Build the dataset of a split: shuffled to train on, else in file order and complete."""

    def load_dataset(self, split: str, *, training: bool | None = None) -> BaseDataset[Any]:
        """The dataset of a split, built at the first call.

        Args:
            training: whether to train on it; None says so of the split ``train`` only.

        Raises:
            UserError: the split is not there or cannot be read.
        """
        training = split == TRAIN if training is None else training
        key = (split, training)
        if key not in self._datasets:
            self._datasets[key] = self.read_dataset(split, training=training)
        return self._datasets[key]

    @abstractmethod
    def valid_subsets(self, names: Sequence[str]) -> list[str]:
        """Splits that the names stand for; a folder of sets stands for all of them.

        Empty when the only name is the default ``valid`` and the data has no such folder.

        Raises:
            UserError: a set is not there; the message lists those that are.
        """

    def use_context_window(self, size: int) -> None:
        """Let data that is scored overlap, so that each target has at least this much context.

        Call it before the data is read. What is at the beginning of a text has less.

        Args:
            size: tokens that a sequence repeats from before its targets.

        Raises:
            ConfigError: the task has no text to slide over, or its sequences are too short.
        """
        if not self.slides_windows:
            raise ConfigError(f"--task {self.cfg._name} has no --context-window; leave it out")
        if size >= self.sequence_length:
            raise ConfigError(
                f"--context-window {size} leaves a sequence of --tokens-per-sample "
                f"{self.sequence_length} nothing to score; give less"
            )
        self.context_window = size

    def build_model(
        self,
        model_cfg: ScalerunDataclass,
        *,
        seed: int,
        device: torch.device,
        meshes: ModelMeshes = ONE_RANK,
        prepare: Callable[[BaseModel], None] = lambda model: None,
    ) -> BaseModel:
        """The model for this task's vocabulary, with drawn weights.

        Args:
            meshes: axes to spread layers over.
            prepare: called with the model while it is shapes alone.

        Raises:
            ConfigError: the model cannot do this task.
        """
        self.check_meshes(meshes)
        model = build_model(
            model_cfg,
            **self.vocabularies(),
            seed=seed,
            device=device,
            meshes=meshes,
            prepare=prepare,
        )
        self.check_model(model, model_cfg)
        if meshes.sequence is not None:
            self.check_slices(model, num_ranks=meshes.sequence.size())
        return model

    def vocabularies(self) -> dict[str, Any]:
        """Sizes and padding symbols, as :func:`build_model` calls them."""
        return {"vocab_size": len(self.dictionary), "padding_idx": self.dictionary.padding_row}

    def flops_per_target(self, model: BaseModel) -> int:
        """Floating-point operations of forward and backward for one target token."""
        return model.training_flops_per_token(self.sequence_length)

    def check_meshes(self, meshes: ModelMeshes) -> None:
        """Refuse sequences that ``--sequence-parallel`` could not spread.

        Raises:
            ConfigError: the tensor axis does not divide their length.
        """
        if meshes.tensor is None or not meshes.sequence_parallel:
            return
        ranks = meshes.tensor.size()
        if self.sequence_length % ranks:
            raise ConfigError(
                f"--sequence-parallel cannot spread --tokens-per-sample {self.sequence_length} "
                f"equally over --model-parallel-size {ranks} ranks; choose a multiple of {ranks}, "
                "or leave it out"
            )

    def check_model(self, model: BaseModel, model_cfg: ScalerunDataclass) -> None:
        """Refuse a model that cannot do this task.

        Raises:
            ConfigError: the task's sequences are longer than the model's positions.
        """
        positions = model.max_positions()
        if positions is not None and self.sequence_length > positions:
            raise ConfigError(
                f"--tokens-per-sample {self.sequence_length} is above the model's {positions} "
                "positions; lower it or raise --max-target-positions"
            )

    def check_slices(self, model: BaseModel, *, num_ranks: int) -> None:
        """Refuse sequences that ranks cannot share equally.

        Raises:
            ConfigError: slices would have to be filled up.
        """
        needed = model.slice_length(self.sequence_length) * num_ranks
        if needed != self.sequence_length:
            raise ConfigError(
                f"--seq-parallel-size {num_ranks} cannot cut --tokens-per-sample "
                f"{self.sequence_length} into equal slices that fit --segment-length and "
                f"--dilated-ratio; the next number of tokens that it can cut is {needed}"
            )

    def own_part(self, batch: Batch, model: BaseModel, ranks: Ranks) -> Batch:
        """The slice of a batch that this rank computes, with the targets in it alone."""
        if ranks.dims.sequence == 1:
            return batch
        return batch.part(ranks.sequence_rank, model.slice_length(batch.tokens.shape[1]))

    def train_step(
        self, batch: Batch, model: nn.Module, criterion: BaseCriterion
    ) -> CriterionOutput:
        """The cost of a training batch, ready for its backward pass."""
        return criterion(model, batch)

    def valid_step(
        self, batch: Batch, model: nn.Module, criterion: BaseCriterion
    ) -> CriterionOutput:
        """The cost of a validation batch; the caller has put the model in evaluation mode."""
        with torch.no_grad():
            return criterion(model, batch)

    def score_names(self) -> tuple[str, ...]:
        """What validation measures besides the loss, by its names in ``metrics.jsonl``.

        Raises:
            ConfigError: a package that measures it is not installed.
        """
        return ()

    def build_scorer(self, model: BaseModel, ranks: Ranks) -> BaseScorer | None:
        """What measures it in one pass over a validation set; None where nothing is measured."""
        return None

    def assets(self) -> dict[str, Path]:
        """Files that a checkpoint must carry to rebuild the task: name -> source."""
        return dict(self.tokenizer.files) if self.tokenizer is not None else {}

    @classmethod
    def with_assets(cls, cfg: Any, folder: Path) -> Any:
        """The configuration with the files of :meth:`assets` read from ``folder`` instead."""
        return cfg

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint's weights depend on: the vocabulary."""
        return {"vocabulary": self.dictionary.digest, "vocabulary_size": len(self.dictionary)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that a checkpoint was made with this vocabulary.

        Raises:
            UserError: it was made with another one.
        """
        own = self.state_dict()
        if state["vocabulary"] is None:
            logger.warning(
                "the checkpoint does not know its vocabulary, only that it has %d symbols; that "
                "%s is the right one is taken on trust",
                state["vocabulary_size"],
                self.vocabulary_source,
            )
        elif state["vocabulary"] != own["vocabulary"]:
            raise UserError(
                "the checkpoint was trained with another vocabulary (digest "
                f"{state['vocabulary'][:8]}, {state['vocabulary_size']} symbols; "
                f"{self.vocabulary_source} now gives {own['vocabulary'][:8]}, "
                f"{own['vocabulary_size']}); give the one that it was trained with"
            )

    def data_report(self) -> list[dict[str, Any]]:
        """Events about the data since the last call: ``{"event": name, ...}``."""
        return []


class UnknownVocabulary:
    """Stands in a checkpoint for a task, where nobody knows what the rows of the embedding mean.

    Args:
        size: number of rows.
        source_size: that of the source's, where it has a vocabulary of its own.
    """

    def __init__(self, size: int, source_size: int | None = None) -> None:
        self.size = size
        self.source_size = source_size

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`BaseTask.state_dict`, without a digest."""
        source = {} if self.source_size is None else {"source_vocabulary_size": self.source_size}
        return {"vocabulary": None, "vocabulary_size": self.size, **source}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take another checkpoint's size."""
        self.size = state["vocabulary_size"]


TASK_REGISTRY: Registry[BaseTask] = Registry("--task", BaseTask)  # type: ignore[type-abstract]
register_task = TASK_REGISTRY.register


def setup_task(cfg: ScalerunDataclass, *, seed: int, cache_dir: Path, quarantine: Path) -> BaseTask:
    """Build the task that ``cfg`` describes."""
    task_class = TASK_REGISTRY.class_for(cfg)
    return task_class.setup_task(cfg, seed=seed, cache_dir=cache_dir, quarantine=quarantine)
