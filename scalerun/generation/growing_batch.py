"""GrowingBatch: sequences that a model reads side by side, and what may follow each.

B sequences, M source tokens, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scalerun.models.base_decoder import BaseDecoder
from scalerun.models.encoder_decoder import EncoderDecoder
from scalerun.modules.incremental_state import EncodedSource, IncrementalState

UNLIMITED = 2**31
"""Tokens that a sequence may reach where the model's context has no end."""


class GrowingBatch:
    """Sequences that grow by one token at a time; others may join them on their way.

    The model reads each token once. Memory follows the longest of the sequences.

    Args:
        model: a decoder, or an encoder with a decoder; in evaluation mode.
        pad: number of a symbol that fills short prompts.
    """

    def __init__(self, model: BaseDecoder | EncoderDecoder, *, pad: int) -> None:
        self.model = model
        self.pad = pad
        self.max_length = model.max_positions() or UNLIMITED
        self.device = next(model.parameters()).device
        self._state: IncrementalState | None = None
        self._roots: list[int] = []
        """For each sequence a number that those with the same source share."""
        self._next_root = 0
        self._spare_source: EncodedSource | None = None
        """A source of one sequence, for calls that others need."""

    def __len__(self) -> int:
        return len(self._roots)

    @property
    def num_columns(self) -> int:
        """Tokens that there are states of for each sequence: those of the longest."""
        return 0 if self._state is None else self._state.length

    def add(
        self,
        prompts: Sequence[Sequence[int]],
        sources: Sequence[Sequence[int]] | None = None,
        *,
        all_logits: bool = False,
    ) -> Tensor:
        """Read prompts, and encode their sources; the sequences come behind those there are.

        Args:
            prompts: of one token at least; padded on the left here.
            sources: for each prompt what an encoder reads; None for a model without an encoder.
            all_logits: of what follows each token of the prompts.

        Returns:
            Logits (B, V) of what follows the prompts, in float32; with ``all_logits`` (B, T, V) of
            the padded prompts, in the model's own format.
        """
        state = self.model.init_incremental_state(len(prompts), self.max_length)
        width = max(map(len, prompts))
        tokens = [[self.pad] * (width - len(prompt)) + [*prompt] for prompt in prompts]
        missing = [width - len(prompt) for prompt in prompts]
        padding_BT = None
        if any(missing):
            first_B = torch.tensor(missing, device=self.device)
            padding_BT = torch.arange(width, device=self.device) < first_B[:, None]
        logits_BTV = self._call(
            tokens, state, padding_BT=padding_BT, sources=sources, all_logits=all_logits
        )
        if state.source is not None:
            first = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._spare_source = state.source.reorder(first)
        self._roots += range(self._next_root, self._next_root + len(prompts))
        self._next_root += len(prompts)
        if self._state is None:
            self._state = state
        else:
            self._state.join(state)
        return logits_BTV if all_logits else logits_BTV[:, -1].float()

    def keep(self, order: Sequence[int]) -> None:
        """Sequence i becomes what sequence ``order[i]`` was; those that are not named leave."""
        if not order:
            self._state, self._roots = None, []
        elif list(order) != list(range(len(self))):
            assert self._state is not None
            before, self._roots = self._roots, [self._roots[i] for i in order]
            self._state.reorder(
                torch.tensor(order, device=self.device), source_moves=self._roots != before
            )

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Extend the sequences by a token each.

        Returns:
            Logits (B, V) of what follows, in float32.
        """
        assert self._state is not None
        return self._call([[token] for token in tokens], self._state)[:, -1].float()

    def add_nothing(self) -> None:
        """Call the model as :meth:`add` does, for the sake of ranks that share its weights."""
        state = self.model.init_incremental_state(1, 1)
        sources = [[0]] if isinstance(self.model, EncoderDecoder) else None
        self._call([[self.pad]], state, sources=sources)
        self._spare_source = state.source

    def read_nothing(self) -> None:
        """Call the model as :meth:`read` does, for the sake of ranks that share its weights."""
        state = self.model.init_incremental_state(1, 1)
        state.source = self._spare_source
        self._call([[self.pad]], state)

    def _call(
        self,
        tokens: list[list[int]],
        state: IncrementalState,
        *,
        padding_BT: Tensor | None = None,
        sources: Sequence[Sequence[int]] | None = None,
        all_logits: bool = False,
    ) -> Tensor:
        """Logits (B, T, V), of the last token alone unless all are asked for."""
        source = {}
        if isinstance(self.model, EncoderDecoder):
            source_BM, padding_BM = (None, None) if sources is None else self._padded(sources)
            source = {"source_BM": source_BM, "source_padding_mask_BM": padding_BM}
        output = self.model(
            tokens_BT=torch.tensor(tokens, device=self.device),
            padding_mask_BT=padding_BT,
            incremental_state=state,
            last_token_only=not all_logits,
            **source,
        )
        return output.whole_logits()

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
