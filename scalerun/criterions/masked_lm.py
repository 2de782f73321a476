"""Losses of masked language models: the cost of the tokens that were hidden.

N targets, V / P columns: this rank's part of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from scalerun.criterions.base_criterion import BaseCriterion, CriterionOutput, register_criterion
from scalerun.criterions.cross_entropy import cross_entropy_sum
from scalerun.criterions.moe import AddsGateLoss, GateLossConfig
from scalerun.data.batch import Batch
from scalerun.data.masked.masked_batch import MaskedBatch
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.distributed.collectives import all_reduce
from scalerun.models.transformer_mlm import TransformerMLM

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


@dataclass
class MaskedLMConfig(ScalerunDataclass):
    """``--criterion masked_lm`` has no settings."""


@register_criterion("masked_lm", MaskedLMConfig)
class MaskedLM(BaseCriterion):
    """Negative log-likelihood of the hidden tokens in nats, summed, computed in float32.

    Logs ``accuracy`` beside it: the share of the hidden tokens that the model ranks first.
    """

    def forward(self, model: nn.Module, batch: Batch) -> CriterionOutput:
        assert isinstance(batch, MaskedBatch)
        output = model(**batch.net_input())
        targets_N = batch.targets.flatten().index_select(0, batch.selected)
        num_correct = count_correct(output.logits.detach(), targets_N, output.vocab_mesh)
        loss_sum = cross_entropy_sum(
            output.logits, targets_N, overwrite_logits=True, vocab_mesh=output.vocab_mesh
        )
        accuracy = num_correct / max(batch.num_targets, 1)
        return self.with_reports(
            CriterionOutput(
                loss_sum,
                batch.num_targets,
                stats={"accuracy": (accuracy, float(batch.num_targets))},
                num_correct=num_correct,
            ),
            output.reports,
        )

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        if not isinstance(model, TransformerMLM):
            raise ConfigError(
                f"--criterion {self.cfg._name} needs a model that predicts hidden tokens; give "
                "--task pretraining and a masked language model, such as --arch mlm_base"
            )


@dataclass
class MaskedLMMoECrossEntropyConfig(GateLossConfig):
    """Settings of ``--criterion masked_lm_moe_cross_entropy``."""


@register_criterion("masked_lm_moe_cross_entropy", MaskedLMMoECrossEntropyConfig)
class MaskedLMMoECrossEntropy(AddsGateLoss, MaskedLM):
    """Masked-language-model loss with a gate loss for each hidden token."""

    without_experts = "masked_lm"


def count_correct(logits: Tensor, targets: Tensor, vocab_mesh: DeviceMesh | None) -> Tensor:
    """How many targets have the largest logit of their row; ties count.

    Args:
        logits: (N, V / P) floating point.
        targets: (N,) int64, numbers in the whole vocabulary.
        vocab_mesh: axis that V is spread over, or None.

    Returns:
        A scalar, float32, the same on all ranks of the axis.
    """
    if vocab_mesh is None:
        largest = logits.amax(1)
        own = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    else:
        columns = targets - logits.shape[1] * vocab_mesh.get_local_rank()
        here = (columns >= 0) & (columns < logits.shape[1])
        own = logits.gather(1, (columns * here).unsqueeze(1)).squeeze(1)
        own = own.masked_fill(~here, -torch.inf)
        both = torch.stack((logits.amax(1), own))
        largest, own = all_reduce(both, vocab_mesh, largest=True).unbind()
    return (own == largest).sum(dtype=torch.float32)
