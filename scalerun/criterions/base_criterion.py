"""BaseCriterion: what a batch costs under a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from scalerun.data.batch import Batch
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.logging.metrics import Number
from scalerun.modules.auxiliary import Auxiliary
from scalerun.modules.per_token import PerToken
from scalerun.registry import Registry

NO_WEIGHT = (
    "the model has experts, whose balance loss this --criterion knows no weight for; give "
    "--criterion moe_cross_entropy"
)


@dataclass
class CriterionOutput:
    """The cost of one batch."""

    loss_sum: Tensor
    """Scalar float32, nats, summed over the targets; the caller divides."""
    num_targets: int
    """Target positions of the batch."""
    aux_loss: Tensor | None = None
    """Scalar that is added for each target, already weighted; None for most models."""
    nll_sum: Tensor | None = None
    """As ``loss_sum``, of -log p of the targets alone, where that is something else; detached."""
    stats: dict[str, Number | tuple[Number, Number]] = field(default_factory=dict)
    """Further values for the log, detached; with a weight, or counted once."""


class BaseCriterion(nn.Module, ABC):
    """Runs the model on a batch and sums the loss over the batch's targets.

    Args:
        cfg: the criterion's settings.
    """

    def __init__(self, cfg: ScalerunDataclass) -> None:
        super().__init__()
        self.cfg = cfg

    @abstractmethod
    def forward(self, model: nn.Module, batch: Batch) -> CriterionOutput:
        """Compute the loss sum of one batch; it may have no target at all."""

    def with_reports(
        self, output: CriterionOutput, reports: Sequence[Auxiliary]
    ) -> CriterionOutput:
        """The output with what the model's layers report beside their own.

        To train without an auxiliary loss, or with one of a weight that nobody chose, would ruin a
        model in silence, so only criterions that have a weight for it accept one in training.

        Raises:
            UserError: the model has an auxiliary loss and is being trained.
        """
        if reports and self.training:
            raise UserError(NO_WEIGHT)
        return output

    def check_model(self, model: nn.Module) -> None:
        """Refuse to train a model as soon as it is built, where :meth:`with_reports` would later.

        Raises:
            ConfigError: it has an auxiliary loss, and :meth:`with_reports` is the base's own.
        """
        refuses = type(self).with_reports is BaseCriterion.with_reports
        if refuses and True in auxiliary_losses(model):
            raise ConfigError(NO_WEIGHT)


def auxiliary_losses(model: nn.Module) -> set[bool | None]:
    """What the per-token layers of a model say of their auxiliary losses."""
    return {part.has_auxiliary_loss for part in model.modules() if isinstance(part, PerToken)}


class Objective:
    """Which loss a run is trained with. Its settings are numbers that may change in mid-run.

    Args:
        cfg: the criterion's configuration.
    """

    def __init__(self, cfg: ScalerunDataclass) -> None:
        self.name = cfg._name

    def state_dict(self) -> dict[str, Any]:
        """The criterion's name."""
        return {"name": self.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that a checkpoint was trained with the same loss.

        Raises:
            UserError: it was not.
        """
        if state["name"] != self.name:
            raise UserError(
                f"the checkpoint was trained with --criterion {state['name']}, not {self.name}; "
                "use the criterion that it was trained with, or start a new run from it: "
                "--save-dir NEW --restore-file OLD"
            )


CRITERION_REGISTRY: Registry[BaseCriterion] = Registry(
    "--criterion",
    BaseCriterion,  # type: ignore[type-abstract]
)
register_criterion = CRITERION_REGISTRY.register


def build_criterion(cfg: ScalerunDataclass) -> BaseCriterion:
    """Build the criterion that ``cfg`` describes."""
    return CRITERION_REGISTRY.class_for(cfg)(cfg)
