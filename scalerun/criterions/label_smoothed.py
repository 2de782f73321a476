"""Cross entropy with label smoothing, summed over target tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from scalerun.criterions.base_criterion import BaseCriterion, CriterionOutput, register_criterion
from scalerun.data.batch import IGNORE_INDEX, Batch
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.modules.megatron.label_smoothing import smoothed_cross_entropy_sums


@dataclass
class LabelSmoothedCrossEntropyConfig(ScalerunDataclass):
    """Settings of ``--criterion label_smoothed_cross_entropy``."""

    label_smoothing: float = option(
        0.0, "share of each target that goes to all symbols equally; 0.1 is usual, 0 is none"
    )

    def validate(self) -> None:
        super().validate()
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(
                f"--label-smoothing is {self.label_smoothing:g}; give a share from 0 to below 1"
            )


@register_criterion("label_smoothed_cross_entropy", LabelSmoothedCrossEntropyConfig)
class LabelSmoothedCrossEntropy(BaseCriterion):
    """Cross entropy in nats against smoothed targets, summed, computed in float32.

    Logged beside the loss is ``nll_loss``, that of the targets as they are, in bits; perplexity and
    bits per byte follow from it.
    """

    cfg: LabelSmoothedCrossEntropyConfig

    def forward(self, model: nn.Module, batch: Batch) -> CriterionOutput:
        output = model(**batch.net_input())
        # Nobody else holds the logits, so their memory can become that of their gradient.
        loss_sum, nll_sum = smoothed_cross_entropy_sums(
            output.logits,
            batch.targets,
            output.vocab_mesh,
            smoothing=self.cfg.label_smoothing,
            ignore_index=IGNORE_INDEX,
            overwrite_logits=True,
        )
        bits = nll_sum.detach() / max(batch.num_targets, 1) / math.log(2)
        found = CriterionOutput(
            loss_sum,
            batch.num_targets,
            nll_sum=nll_sum.detach(),
            stats={"nll_loss": (bits, float(batch.num_targets))},
        )
        return self.with_reports(found, output.reports)
