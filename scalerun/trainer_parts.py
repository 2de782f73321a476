"""What a Trainer is made of, and where its run stands."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from scalerun.checkpoint.checkpoint_manager import CheckpointManager
from scalerun.criterions.base_criterion import BaseCriterion
from scalerun.data.loader import BatchLoader
from scalerun.distributed.gradient_sum import GradientSum, LocalSum
from scalerun.distributed.precision import Precision
from scalerun.distributed.ranks import ALONE, Ranks
from scalerun.logging.base_sink import BaseSink
from scalerun.logging.profiler import UpdateProfiler
from scalerun.logging.throughput import Throughput
from scalerun.models.base_model import BaseModel
from scalerun.optim.base_optimizer import BaseOptimizer
from scalerun.optim.ema import EMA
from scalerun.optim.loss_scaler import DynamicLossScaler
from scalerun.optim.lr_scheduler.base_lr_scheduler import BaseLRScheduler
from scalerun.tasks.base_task import BaseTask


@dataclass
class TrainerParts:
    """Everything a Trainer puts to work. Built in ``cli/assembly.py``."""

    task: BaseTask
    model: BaseModel
    criterion: BaseCriterion
    optimizer: BaseOptimizer
    lr_scheduler: BaseLRScheduler
    loader: BatchLoader
    checkpoints: CheckpointManager
    sinks: BaseSink
    throughput: Throughput
    precision: Precision
    loss_scaler: DynamicLossScaler | None
    ema: EMA | None
    profiler: UpdateProfiler
    valid_subsets: list[str]
    ranks: Ranks = ALONE
    gradients: GradientSum = field(default_factory=LocalSum)


@dataclass
class Progress:
    """Where a run stands. Saved with every checkpoint."""

    num_updates: int = 0
    validated_at: int = -1
    """Update of the last finished validation."""
    best_metric: float | None = None
    validations_without_gain: int = 0
    unfinished_validation: bool = False
    """A stop broke off the validation of this update; it has to be done again."""
    skips_in_a_row: int = 0
    skipped_ranges: list[list[int]] = field(default_factory=list)
    """Entries of ``--skip-batches`` that have been carried out."""

    def state_dict(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`."""
        for name, value in state.items():
            setattr(self, name, value)
