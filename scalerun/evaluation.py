"""Loss of a model on a validation set: the one way, for training and for ``validate``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from scalerun.criterions.base_criterion import BaseCriterion, CriterionOutput
from scalerun.data.base_dataset import DatasetCounts
from scalerun.data.loader import valid_batches
from scalerun.distributed.precision import Precision
from scalerun.distributed.ranks import ALONE, Ranks
from scalerun.logging.metrics import bits_per_byte, perplexity
from scalerun.models.base_model import BaseModel
from scalerun.tasks.base_task import BaseTask


@dataclass(frozen=True)
class SubsetResult:
    """What a validation set gave."""

    subset: str
    loss: float
    """Bits per target token."""
    tokens: int
    """Target tokens that were scored."""
    documents: int
    """Documents in the set."""
    bytes_per_token: float | None
    """UTF-8 bytes of the whole set's text per target token; None where there is no text."""
    words: int | None = None
    """Words that were scored; None where they were not counted."""
    nll_loss: float | None = None
    """Bits per target token of its probability alone; None where that is the loss."""
    scores: dict[str, float] = field(default_factory=dict)
    """What else was measured: ``accuracy``, the share of the target tokens that the model ranks
    first, where the criterion counts them, and what the task measures."""

    @property
    def bits(self) -> float:
        """What a target token costs whoever encodes it with the model, in bits."""
        return self.loss if self.nll_loss is None else self.nll_loss

    @property
    def ppl(self) -> float:
        """Perplexity per target token; infinite where it overflows."""
        return perplexity(self.bits)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per UTF-8 byte of text, comparable between tokenizers."""
        if self.bytes_per_token is None:
            return None
        return bits_per_byte(self.bits, self.bytes_per_token)

    @property
    def word_ppl(self) -> float | None:
        """Perplexity per word, comparable between tokenizers; None where words were not counted."""
        return perplexity(self.bits * self.tokens / self.words) if self.words else None

    def record(self) -> dict[str, float | int | str | None]:
        """The numbers under their names in ``metrics.jsonl``."""
        return {
            "subset": self.subset,
            "loss": self.loss,
            **({} if self.nll_loss is None else {"nll_loss": self.nll_loss}),
            "ppl": self.ppl,
            "bits_per_byte": self.bits_per_byte,
            **self.scores,
            "tokens": self.tokens,
        }


def evaluate(
    task: BaseTask,
    model: BaseModel,
    criterion: BaseCriterion,
    subset: str,
    *,
    batch_size: int,
    precision: Precision,
    max_steps: int | None = None,
    num_workers: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    ranks: Ranks = ALONE,
) -> SubsetResult | None:
    """Score a validation set. Every target token counts once, whatever the batch size.

    The model is left in the mode it was in, and no random number is drawn that training depends on.

    Args:
        max_steps: score at most this many batches.
        should_stop: asked before each batch, on every rank.
        ranks: share the batches; each of them gets the result.

    Returns:
        The result, or None when ``should_stop`` ended the pass.
    """
    dataset = task.load_dataset(subset, training=False)
    scorer = task.build_scorer(model, ranks)
    was_training = model.training
    model.eval()
    criterion.eval()
    totals = _Totals(precision.device)
    try:
        with torch.no_grad():
            for batch in valid_batches(
                dataset,
                batch_size=batch_size,
                max_steps=max_steps,
                num_workers=num_workers,
                data_rank=ranks.data_rank,
                data_size=ranks.data_size,
            ):
                if should_stop():
                    return None
                batch = task.own_part(batch, model, ranks).to(precision.device)
                with precision.autocast():
                    output = task.valid_step(batch, model, criterion)
                    if scorer is not None:
                        scorer.add(batch)
                totals.add(output)
    finally:
        model.train(was_training)
        criterion.train(was_training)
    scores = {} if scorer is None else scorer.scores()
    return totals.result(subset, dataset.counts(), scores, ranks)


class _Totals:
    """Sums over the batches of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(6, dtype=torch.float64, device=device)

    def add(self, output: CriterionOutput) -> None:
        """Count a batch."""
        loss_sum, nll_sum, num_targets, num_correct, smoothed, counted = self._sums.unbind()
        loss_sum += output.loss_sum
        nll_sum += output.loss_sum if output.nll_sum is None else output.nll_sum
        num_targets += output.num_targets
        smoothed += output.nll_sum is not None
        if output.num_correct is not None:
            num_correct += output.num_correct
            counted += 1

    def result(
        self, subset: str, counts: DatasetCounts, scores: dict[str, float], ranks: Ranks
    ) -> SubsetResult:
        """The result of all ranks' batches, on each of them."""
        loss, nll, tokens, correct, smoothed, counted = ranks.sum_over_data(self._sums).tolist()
        per_token = 1 / max(tokens, 1)
        return SubsetResult(
            subset=subset,
            loss=loss * per_token / math.log(2),
            nll_loss=nll * per_token / math.log(2) if smoothed else None,
            tokens=int(tokens),
            documents=counts.documents,
            bytes_per_token=counts.bytes_per_token,
            scores={**({"accuracy": correct * per_token} if counted else {}), **scores},
        )
