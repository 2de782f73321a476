"""What a decoder remembers between calls: one state per layer, and where the sequences stand.

B batch, H heads, T new tokens, S keys so far, M source tokens, K width of a head, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class LayerState(ABC):
    """The memory of one layer. Every tensor in it has the batch as its first dimension."""

    @abstractmethod
    def reorder(self, order: Tensor) -> None:
        """Make row i what row ``order[i]`` was; ``order`` may be of another length."""


class KVCache(LayerState):
    """Keys and values of one attention layer.

    The buffers appear at the first :meth:`append`, with the dtype and device of the keys and room
    for twice the tokens, and grow in the same way. Keys are stored as the scores use them, so
    rotated keys are never rotated again.

    Args:
        max_length: S at the end, the most that there will be room for.
        projections: weight and bias of queries, keys and values in one, for the new tokens; other
            weights would make the cached keys worthless, so they stay what they are.
    """

    def __init__(
        self, max_length: int, *, projections: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.max_length = max_length
        self.projections = projections
        self.length = 0
        """S, slots that are in use."""
        self.keys_BHSK: Tensor | None = None
        self.values_BHSK: Tensor | None = None

    def append(self, k_BHTK: Tensor, v_BHTK: Tensor, *, start: int) -> tuple[Tensor, Tensor]:
        """Write at slots ``start`` and after; return views of all keys and values so far."""
        num_tokens = k_BHTK.shape[2]
        end = start + num_tokens
        if self.keys_BHSK is None or self.values_BHSK is None:
            self.keys_BHSK, self.values_BHSK = k_BHTK[:, :, :0], v_BHTK[:, :, :0]
        if end > self.keys_BHSK.shape[2]:
            self._move(min(2 * end, self.max_length))
        self.keys_BHSK.narrow(2, start, num_tokens).copy_(k_BHTK)
        self.values_BHSK.narrow(2, start, num_tokens).copy_(v_BHTK)
        self.length = end
        return self.keys_BHSK.narrow(2, 0, end), self.values_BHSK.narrow(2, 0, end)

    def reorder(self, order: Tensor) -> None:
        if self.keys_BHSK is not None:
            self._move(self.keys_BHSK.shape[2], order)

    def _move(self, num_slots: int, order: Tensor | None = None) -> None:
        """Carry the slots in use into buffers of another size."""
        assert self.keys_BHSK is not None
        assert self.values_BHSK is not None

        def moved(old_BHSK: Tensor) -> Tensor:
            used_BHSK = old_BHSK.narrow(2, 0, self.length)
            if order is not None:
                used_BHSK = used_BHSK.index_select(0, order)
            batch, heads, _, width = used_BHSK.shape
            new_BHSK = old_BHSK.new_empty((batch, heads, num_slots, width))
            new_BHSK.narrow(2, 0, self.length).copy_(used_BHSK)
            return new_BHSK

        self.keys_BHSK, self.values_BHSK = moved(self.keys_BHSK), moved(self.values_BHSK)


class SourceCache(LayerState):
    """Keys and values of an encoded source, projected once."""

    def __init__(self) -> None:
        self.keys_BHMK: Tensor | None = None
        self.values_BHMK: Tensor | None = None

    def reorder(self, order: Tensor) -> None:
        if self.keys_BHMK is not None and self.values_BHMK is not None:
            self.keys_BHMK = self.keys_BHMK.index_select(0, order)
            self.values_BHMK = self.values_BHMK.index_select(0, order)


class BlockState(LayerState):
    """The memory of a block with two mixers: its own sequence's and the source's."""

    def __init__(self, mixer: LayerState, cross: LayerState) -> None:
        self.mixer = mixer
        self.cross = cross

    def reorder(self, order: Tensor) -> None:
        self.mixer.reorder(order)
        self.cross.reorder(order)


@dataclass(frozen=True)
class EncodedSource:
    """An encoder's output, for a decoder to read."""

    features_BMD: Tensor
    """(B, M, D)"""
    padding_BM: Tensor | None = None
    """(B, M) bool, True for padding; None if there is none."""

    def reorder(self, order: Tensor) -> EncodedSource:
        """With row ``order[i]`` as row i."""
        padding = self.padding_BM
        return EncodedSource(
            self.features_BMD.index_select(0, order),
            None if padding is None else padding.index_select(0, order),
        )


class IncrementalState:
    """The memory of a decoder for a batch of sequences that grow together.

    Args:
        layers: the states of the layers, in order.
        batch_size: sequences.
        max_length: tokens (padding included) that a sequence may reach.
    """

    def __init__(self, layers: Sequence[LayerState], *, batch_size: int, max_length: int) -> None:
        self.layers = list(layers)
        self.batch_size = batch_size
        self.max_length = max_length
        self.length = 0
        """Tokens (padding included) that every sequence has so far."""
        self.source: EncodedSource | None = None
        """What the decoder's cross-attention reads."""
        self._index_1S: Tensor | None = None
        self._padding_BS: Tensor | None = None
        self._positions_BS: Tensor | None = None

    def check(self, batch_size: int, num_tokens: int) -> None:
        """Refuse new tokens that do not fit.

        Raises:
            ValueError: the batch has another size, or a sequence would outgrow ``max_length``.
        """
        if batch_size != self.batch_size:
            raise ValueError(
                f"the incremental state holds {self.batch_size} sequences, the tokens {batch_size}"
            )
        if self.length + num_tokens > self.max_length:
            raise ValueError(
                f"{self.length} tokens in the incremental state and {num_tokens} new ones exceed "
                f"its max_length {self.max_length}"
            )

    def place(
        self, padding_BT: Tensor | None, *, num_tokens: int, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Positions of the next tokens, positions of all keys, and which keys are padding.

        Padding does not count: the first real token of a row stands at 0. Without any padding so
        far, rows agree, and the results are (1, T), (1, S) and None; else (B, T), (B, S), (B, S).
        """
        start, end = self.length, self.length + num_tokens
        if padding_BT is None and self._padding_BS is None:
            if self._index_1S is None:
                self._index_1S = torch.arange(self.max_length, device=device).unsqueeze(0)
            return self._index_1S[:, start:end], self._index_1S[:, :end], None
        if self._padding_BS is None or self._positions_BS is None:
            shape = (self.batch_size, self.max_length)
            self._padding_BS = torch.zeros(shape, dtype=torch.bool, device=device)
            self._positions_BS = torch.arange(self.max_length, device=device).repeat(shape[0], 1)
        self._padding_BS[:, start:end] = False if padding_BT is None else padding_BT
        counts = (~self._padding_BS[:, :end]).cumsum(1) - 1
        self._positions_BS[:, start:end] = counts[:, start:].clamp_min(0)
        keys = self._positions_BS[:, :end]
        return keys[:, start:], keys, self._padding_BS[:, :end]

    def advance(self, num_tokens: int) -> None:
        """Count tokens whose states all layers now hold."""
        self.length += num_tokens

    def reorder(self, order: Tensor, *, source_moves: bool = True) -> None:
        """Make sequence i what sequence ``order[i]`` was, as beam search needs it.

        Args:
            order: (new batch size,) int64; a sequence may be repeated or left out.
            source_moves: False where each sequence reads the same source as the one that was in
                its place, so that nothing of the source needs to be copied.
        """
        for layer in self.layers:
            if isinstance(layer, BlockState) and not source_moves:
                layer.mixer.reorder(order)
            else:
                layer.reorder(order)
        if self.source is not None and source_moves:
            self.source = self.source.reorder(order)
        if self._padding_BS is not None and self._positions_BS is not None:
            self._padding_BS = self._padding_BS.index_select(0, order)
            self._positions_BS = self._positions_BS.index_select(0, order)
        self.batch_size = order.shape[0]
