"""Losses for models with experts: what the targets cost, and how evenly the experts are used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from scalerun.criterions.base_criterion import (
    BaseCriterion,
    CriterionOutput,
    auxiliary_losses,
    register_criterion,
)
from scalerun.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.modules.auxiliary import Auxiliary, mean_stats, total_loss

NO_EXPERTS = (
    "--criterion {} needs a model with experts; give --moe-freq and --moe-expert-count, or "
    "--criterion {}"
)


@dataclass
class GateLossConfig(ScalerunDataclass):
    """How the balance losses of the layers enter the loss."""

    moe_gate_loss_wt: float = option(0.01, "weight of the gate loss beside that of a target")
    moe_gate_loss_combine_method: str = option(
        "sum", "gate loss of a model, from those of its layers", choices=("sum", "average")
    )
    moe_gate_loss_transform: str = option(
        "none", "use the negative logarithm of the gate loss", choices=("none", "neg_log")
    )

    def validate(self) -> None:
        super().validate()
        if not (math.isfinite(self.moe_gate_loss_wt) and self.moe_gate_loss_wt >= 0):
            raise ConfigError(f"--moe-gate-loss-wt is {self.moe_gate_loss_wt:g}; give 0 or more")


class AddsGateLoss(BaseCriterion):
    """Gives any criterion that it is mixed into a gate loss, of the weight of its settings.

    The reported loss is that of the targets alone; the gate loss is logged beside it, as
    ``moe_gate_loss``, with the statistics of the routing.
    """

    without_experts: ClassVar[str]
    """The criterion for models without experts."""

    def with_reports(
        self, output: CriterionOutput, reports: Sequence[Auxiliary]
    ) -> CriterionOutput:
        """The output with the weighted gate loss and the statistics of the layers.

        Raises:
            UserError: no layer of the model has experts.
        """
        assert isinstance(self.cfg, GateLossConfig)
        if not reports:
            raise UserError(self._no_experts())
        loss = gate_loss(reports, self.cfg)
        output.aux_loss = self.cfg.moe_gate_loss_wt * loss
        output.stats |= {
            "moe_gate_loss": (loss.detach(), float(output.num_targets)),
            **mean_stats(reports),
        }
        return output

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        if auxiliary_losses(model) == {False}:
            raise ConfigError(self._no_experts())

    def _no_experts(self) -> str:
        return NO_EXPERTS.format(self.cfg._name, self.without_experts)


def gate_loss(reports: Sequence[Auxiliary], cfg: GateLossConfig) -> Tensor:
    """One unweighted loss from those of the layers, of which there is at least one."""
    loss = total_loss(reports)
    assert loss is not None
    if cfg.moe_gate_loss_combine_method == "average":
        loss = loss / len(reports)
    if cfg.moe_gate_loss_transform == "neg_log":
        # It is 0 for a batch of nothing but padding, whose weight of 0 times infinity is no number.
        return -loss.clamp(min=torch.finfo(loss.dtype).tiny).log()
    return loss


@dataclass
class MoECrossEntropyConfig(GateLossConfig, CrossEntropyConfig):
    """Settings of ``--criterion moe_cross_entropy``."""


@register_criterion("moe_cross_entropy", MoECrossEntropyConfig)
class MoECrossEntropy(AddsGateLoss, CrossEntropy):
    """Cross entropy with a gate loss: ``sum over targets of (-log p + weight * gate loss)``."""

    without_experts = "cross_entropy"
