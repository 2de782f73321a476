"""TokenScorer: how likely a decoder finds tokens that are given.

B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scalerun.data.batch import IGNORE_INDEX
from scalerun.distributed.precision import Precision
from scalerun.models.base_decoder import BaseDecoder

Ids = Sequence[int]


@dataclass(frozen=True)
class ScoredTokens:
    """A continuation as a decoder sees it."""

    logprobs: list[float]
    """Natural log-probability of each token."""
    is_greedy: bool
    """Whether each of them is the most likely one."""


class TokenScorer:
    """Scores continuations behind contexts, several at a time; the batch size changes no score.

    Args:
        model: the decoder, in evaluation mode.
        pad_id: fills short rows.
        precision: number format, and the device that the model is on.
        batch_size: rows at a time.
    """

    def __init__(
        self, model: BaseDecoder, *, pad_id: int, precision: Precision, batch_size: int
    ) -> None:
        self.model = model
        self.pad_id = pad_id
        self.precision = precision
        self.batch_size = batch_size

    @torch.inference_mode()
    def score(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[ScoredTokens]:
        """Score the second of each pair behind the first, which begins with what the model reads
        first and is not empty. Together they fit into the model, but for the last token.
        """
        # Long rows first: rows of a batch are alike, and what does not fit fails at once.
        order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
        scored: dict[int, ScoredTokens] = {}
        for start in range(0, len(order), self.batch_size):
            mine = order[start : start + self.batch_size]
            scored.update(zip(mine, self._score_batch([pairs[i] for i in mine]), strict=True))
        return [scored[i] for i in range(len(pairs))]

    def _score_batch(self, pairs: Sequence[tuple[Ids, Ids]]) -> Iterator[ScoredTokens]:
        rows = [[*context, *continuation] for context, continuation in pairs]
        width = max(map(len, rows)) - 1
        device = self.precision.device
        tokens_BT = torch.full((len(rows), width), self.pad_id, device=device)
        targets_BT = torch.full_like(tokens_BT, IGNORE_INDEX)
        padding_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        for i, ((context, continuation), row) in enumerate(zip(pairs, rows, strict=True)):
            size, first = len(row) - 1, len(context) - 1
            tokens_BT[i, :size] = torch.tensor(row[:-1], device=device)
            targets_BT[i, first:size] = torch.tensor(continuation, device=device)
            padding_BT[i, :size] = False
        with self.precision.autocast():
            output = self.model(
                tokens_BT, padding_mask_BT=padding_BT if bool(padding_BT.any()) else None
            )
        logits_BTV = output.whole_logits()
        logprobs_BT = target_logprobs(logits_BTV, targets_BT)
        best_BT = logits_BTV.argmax(-1)
        for i, (context, continuation) in enumerate(pairs):
            places = slice(len(context) - 1, len(context) - 1 + len(continuation))
            greedy = bool((best_BT[i, places] == targets_BT[i, places]).all())
            yield ScoredTokens(logprobs_BT[i, places].tolist(), greedy)


def target_logprobs(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """(B, T) natural log-probability of each target, in float32 or better; 0 where there is none.

    Args:
        logits_BTV: (B, T, V) floating point.
        targets_BT: (B, T) int64, ``IGNORE_INDEX`` where there is no target.
    """
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)
    return -F.cross_entropy(
        logits_BTV.flatten(0, 1).to(wide),
        targets_BT.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    ).view_as(targets_BT)
