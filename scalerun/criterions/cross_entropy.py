"""Cross entropy, summed over target tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from scalerun.criterions.base_criterion import BaseCriterion, CriterionOutput, register_criterion
from scalerun.criterions.linear_cross_entropy import linear_cross_entropy_sum
from scalerun.data.batch import IGNORE_INDEX, Batch
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.models.base_model import BaseModel
from scalerun.models.transformer_mlm import TransformerMLM
from scalerun.modules.megatron.cross_entropy import vocab_parallel_cross_entropy_sum

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


@dataclass
class CrossEntropyConfig(ScalerunDataclass):
    """Settings of ``--criterion cross_entropy``."""

    cross_entropy_chunk_tokens: int = option(
        0, "tokens whose logits exist at a time; 0: those of the whole batch"
    )

    def validate(self) -> None:
        super().validate()
        if self.cross_entropy_chunk_tokens < 0:
            raise ConfigError(
                f"--cross-entropy-chunk-tokens is {self.cross_entropy_chunk_tokens}; give a number "
                "of tokens, or 0 for all of a batch"
            )


@register_criterion("cross_entropy", CrossEntropyConfig)
class CrossEntropy(BaseCriterion):
    """Negative log-likelihood of the targets in nats, summed, computed in float32."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens whose logits exist at a time; 0 for all, also where a subclass cannot be told."""
        return (
            self.cfg.cross_entropy_chunk_tokens if isinstance(self.cfg, CrossEntropyConfig) else 0
        )

    def forward(self, model: nn.Module, batch: Batch) -> CriterionOutput:
        chunk = self.chunk_tokens
        if chunk > 0:

            def loss(features: Tensor, weight: Tensor, mesh: DeviceMesh | None) -> Tensor:
                return linear_cross_entropy_sum(
                    features, weight, batch.targets, chunk_tokens=chunk, vocab_mesh=mesh
                )

            output = model(**batch.net_input(), loss=loss)
            loss_sum = output.loss
        else:
            output = model(**batch.net_input())
            # Nobody else holds the logits, so their memory can become that of their gradient.
            loss_sum = cross_entropy_sum(
                output.logits, batch.targets, overwrite_logits=True, vocab_mesh=output.vocab_mesh
            )
        return self.with_reports(CriterionOutput(loss_sum, batch.num_targets), output.reports)

    def check_model(self, model: nn.Module) -> None:
        super().check_model(model)
        if isinstance(model, TransformerMLM):
            raise ConfigError(
                f"--criterion {self.cfg._name} needs a model that predicts every token, and this "
                "--arch predicts hidden ones; give --criterion masked_lm"
            )
        takes_loss = isinstance(model, BaseModel) and model.takes_loss
        if self.chunk_tokens > 0 and not takes_loss:
            raise ConfigError(
                "--cross-entropy-chunk-tokens needs a model that computes the loss from its "
                "features, and this --arch gives logits alone; remove it"
            )


def cross_entropy_sum(
    logits: Tensor,
    targets: Tensor,
    *,
    overwrite_logits: bool = False,
    vocab_mesh: DeviceMesh | None = None,
) -> Tensor:
    """Sum of -log softmax(logits)[target] over the targets that are not ``IGNORE_INDEX``.

    The softmax is computed in float32 or better, a block of rows at a time,
    forward and again backward. Besides the logits and their gradient nothing of their size is held.

    Args:
        logits: (..., V) floating point, or this rank's part of V.
        targets: (...) int64.
        overwrite_logits: let the backward pass write the gradient over the logits, which are often
            the largest tensor of an update. A second backward pass is then an error.
        vocab_mesh: axis that V is spread over, or None.

    Returns:
        A scalar, float32 or better; 0 when there are no targets.
    """
    return vocab_parallel_cross_entropy_sum(
        logits,
        targets,
        vocab_mesh,
        ignore_index=IGNORE_INDEX,
        overwrite_logits=overwrite_logits,
    )
