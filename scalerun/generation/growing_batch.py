"""GrowingBatch: sequences that a model reads side by side, and what may follow each.

B sequences, M source tokens, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.distributed.ranks import Control
from scalerun.models.base_decoder import BaseDecoder
from scalerun.models.encoder_decoder import EncoderDecoder
from scalerun.modules.incremental_state import IncrementalState


class GrowingBatch:
    """Sequences that grow by one token at a time; the model reads each token once.

    A ``with`` block ends when every rank has ended its own, and until then joins in their calls of
    the model: ranks that share weights or experts can only call it together. Every rank has to
    open the same number of batches.

    Args:
        model: a decoder, or an encoder with a decoder; in evaluation mode.
        pad: number of a symbol that fills short prompts.
        max_length: tokens, padding included, that the longest may reach.
        control: carries between the ranks whether any of them still calls the model.
    """

    def __init__(
        self,
        model: BaseDecoder | EncoderDecoder,
        *,
        pad: int,
        max_length: int,
        control: Control | None = None,
    ) -> None:
        self.model = model
        self.pad = pad
        self.max_length = max_length
        self.control = control or Control()
        self.device = next(model.parameters()).device
        self._state = model.init_incremental_state(0, max_length)
        self._roots: list[int] = []
        """For each sequence the prompt that it began with."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self.control.any(False):
            self._join_in()

    def start(
        self, prompts: Sequence[Sequence[int]], sources: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """Read the prompts, and encode the sources; every rank's first call.

        Args:
            prompts: of one token at least; padded on the left here.
            sources: for each prompt what an encoder reads; None for a model without an encoder.

        Returns:
            As :meth:`read`.
        """
        self._state = self.model.init_incremental_state(len(prompts), self.max_length)
        self._roots = list(range(len(prompts)))
        width = max(map(len, prompts))
        tokens = [[self.pad] * (width - len(prompt)) + [*prompt] for prompt in prompts]
        missing = [width - len(prompt) for prompt in prompts]
        padding_BT = None
        if any(missing):
            first_B = torch.tensor(missing, device=self.device)
            padding_BT = torch.arange(width, device=self.device) < first_B[:, None]
        return self._call(tokens, padding_BT, sources)

    def read(self, tokens: Sequence[int], order: Sequence[int] | None = None) -> Tensor:
        """Extend the sequences by a token each.

        Args:
            tokens: one for each sequence.
            order: sequence i first becomes what sequence ``order[i]`` was; None leaves all.

        Returns:
            Log-probabilities (B, V) of what follows, in float32.

        Raises:
            UserError: they are not finite.
        """
        if order is not None:
            before, self._roots = self._roots, [self._roots[i] for i in order]
            self._state.reorder(
                torch.tensor(order, device=self.device), source_moves=self._roots != before
            )
        self.control.any(True)
        return self._call([[token] for token in tokens])

    def _call(
        self,
        tokens: list[list[int]],
        padding_BT: Tensor | None = None,
        sources: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        source_BM = padding_BM = None
        if sources is not None:
            source_BM, padding_BM = self._padded(sources)
        output = self._forward(
            torch.tensor(tokens, device=self.device),
            self._state,
            padding_BT=padding_BT,
            source_BM=source_BM,
            source_padding_BM=padding_BM,
        )
        logprobs_BV = output.float().log_softmax(-1)
        if bool(logprobs_BV.isnan().any()):
            raise UserError(
                "the model's output is not finite: its weights are damaged, or training had "
                "diverged when they were saved; take an earlier checkpoint"
            )
        return logprobs_BV

    def _join_in(self) -> None:
        """Call the model for the other ranks' sake."""
        self._state.reorder(torch.zeros(1, dtype=torch.int64, device=self.device))
        state = self.model.init_incremental_state(1, 1)
        state.source = self._state.source
        self._forward(torch.tensor([[self.pad]], device=self.device), state)

    def _forward(
        self,
        tokens_BT: Tensor,
        state: IncrementalState,
        *,
        padding_BT: Tensor | None = None,
        source_BM: Tensor | None = None,
        source_padding_BM: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, V) of what follows the last token."""
        source = {}
        if isinstance(self.model, EncoderDecoder):
            source = {"source_BM": source_BM, "source_padding_mask_BM": source_padding_BM}
        output = self.model(
            tokens_BT=tokens_BT,
            padding_mask_BT=padding_BT,
            incremental_state=state,
            last_token_only=True,
            **source,
        )
        return output.whole_logits()[:, -1]

    def _padded(self, sources: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Sources (B, M) for the encoder, and which of them is padding, on the right."""
        assert isinstance(self.model, EncoderDecoder)
        width = max(map(len, sources))
        # Hidden by the mask; any number that the embedding has will do.
        pad = self.model.padding_idx or 0
        rows = [[*source] + [pad] * (width - len(source)) for source in sources]
        lengths_B = torch.tensor([len(source) for source in sources], device=self.device)
        padding_BM = torch.arange(width, device=self.device) >= lengths_B[:, None]
        return torch.tensor(rows, device=self.device), padding_BM
