"""What a decoder remembers between calls: one state per layer, and where the sequences stand.

B batch, H heads, T new tokens, S keys so far, M source tokens, K width of a head, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor


class LayerState(ABC):
    """The memory of one layer. Every tensor in it has the batch as its first dimension."""

    @abstractmethod
    def reorder(self, order: Tensor) -> None:
        """Make row i what row ``order[i]`` was; ``order`` may be of another length."""

    @abstractmethod
    def join(self, other: Self) -> None:
        """Append the rows of another state of the same layer, which has read something too.

        What holds a slot for each token is aligned at the end: the shorter gets slots ahead of its
        own, which nobody reads.
        """

    def drop_first(self, num_tokens: int) -> None:
        """Forget so many of the first slots, if there is one for each token."""
        return


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
            # Room that a longer sequence needed, which has left, is given back.
            self._move(min(self.keys_BHSK.shape[2], 2 * self.length), order)

    def join(self, other: Self) -> None:
        length = max(self.length, other.length)

        def joined(own_BHSK: Tensor | None, other_BHSK: Tensor | None) -> Tensor:
            assert own_BHSK is not None
            assert other_BHSK is not None
            own_BHSK = own_BHSK.narrow(2, 0, self.length)
            other_BHSK = other_BHSK.narrow(2, 0, other.length)
            # Zeros and not what memory happens to hold: a masked NaN would still be one.
            sides = (F.pad(x, (0, 0, length - x.shape[2], 0)) for x in (own_BHSK, other_BHSK))
            return torch.cat(tuple(sides))

        self.keys_BHSK = joined(self.keys_BHSK, other.keys_BHSK)
        self.values_BHSK = joined(self.values_BHSK, other.values_BHSK)
        self.length = length

    def drop_first(self, num_tokens: int) -> None:
        if self.keys_BHSK is not None and self.values_BHSK is not None:
            self.keys_BHSK = self.keys_BHSK[:, :, num_tokens:]
            self.values_BHSK = self.values_BHSK[:, :, num_tokens:]
            self.length -= num_tokens

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

    def join(self, other: Self) -> None:
        assert self.keys_BHMK is not None
        assert self.values_BHMK is not None
        assert other.keys_BHMK is not None
        assert other.values_BHMK is not None
        self.keys_BHMK = _joined_at_start(self.keys_BHMK, other.keys_BHMK, dim=2)
        self.values_BHMK = _joined_at_start(self.values_BHMK, other.values_BHMK, dim=2)

    def keep_first(self, num_tokens: int) -> None:
        """Forget all but so many of the source's first tokens."""
        if self.keys_BHMK is not None and self.values_BHMK is not None:
            self.keys_BHMK = self.keys_BHMK[:, :, :num_tokens]
            self.values_BHMK = self.values_BHMK[:, :, :num_tokens]


def _joined_at_start(first: Tensor, second: Tensor, *, dim: int) -> Tensor:
    """Rows of both, the shorter along ``dim`` filled up with zeros at its end."""
    size = max(first.shape[dim], second.shape[dim])
    behind = [0] * (2 * (first.ndim - 1 - dim) + 1)
    return torch.cat([F.pad(x, (*behind, size - x.shape[dim])) for x in (first, second)])


class BlockState(LayerState):
    """The memory of a block with two mixers: its own sequence's and the source's."""

    def __init__(self, mixer: LayerState, cross: LayerState) -> None:
        self.mixer = mixer
        self.cross = cross

    def reorder(self, order: Tensor) -> None:
        self.mixer.reorder(order)
        self.cross.reorder(order)

    def join(self, other: Self) -> None:
        self.mixer.join(other.mixer)
        self.cross.join(other.cross)

    def drop_first(self, num_tokens: int) -> None:
        self.mixer.drop_first(num_tokens)


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

    def joined(self, other: EncodedSource) -> EncodedSource:
        """With the rows of another behind; the shorter sources are padded at their ends."""
        features_BMD = _joined_at_start(self.features_BMD, other.features_BMD, dim=1)
        padding_BM = torch.ones(
            features_BMD.shape[:2], dtype=torch.bool, device=features_BMD.device
        )
        first = 0
        for each in (self, other):
            batch, length, _ = each.features_BMD.shape
            padding = False if each.padding_BM is None else each.padding_BM
            padding_BM[first : first + batch, :length] = padding
            first += batch
        return EncodedSource(features_BMD, padding_BM)

    def without_common_padding(self) -> EncodedSource:
        """Without the last tokens, where they are padding in every row."""
        if self.padding_BM is None:
            return self
        used_M = (~self.padding_BM).any(0).nonzero()
        length = int(used_M[-1]) + 1 if len(used_M) else 1
        return EncodedSource(self.features_BMD[:, :length], self.padding_BM[:, :length])


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
        self._device: torch.device | None = None
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
        self._device = device
        start, end = self.length, self.length + num_tokens
        if padding_BT is None and self._padding_BS is None:
            if self._index_1S is None or self._index_1S.shape[1] < end:
                size = min(2 * end, self.max_length)
                self._index_1S = torch.arange(size, device=device).unsqueeze(0)
            return self._index_1S[:, start:end], self._index_1S[:, :end], None
        shape = (self.batch_size, num_tokens)
        if padding_BT is None:
            padding_BT = torch.zeros(shape, dtype=torch.bool, device=device)
        before_BS, keys_BS = self._placed()
        seen_B1 = (~before_BS).sum(1, keepdim=True)
        new_BT = (seen_B1 + (~padding_BT).cumsum(1) - 1).clamp_min(0)
        self._padding_BS = torch.cat((before_BS, padding_BT), 1)
        self._positions_BS = torch.cat((keys_BS, new_BT), 1)
        return new_BT, self._positions_BS, self._padding_BS

    def _placed(self) -> tuple[Tensor, Tensor]:
        """Which tokens so far are padding, and where they stand: (B, S) each."""
        if self._padding_BS is not None and self._positions_BS is not None:
            # A call that failed half-way may have left more.
            return self._padding_BS[:, : self.length], self._positions_BS[:, : self.length]
        shape = (self.batch_size, self.length)
        padding_BS = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return padding_BS, torch.arange(self.length, device=self._device).repeat(shape[0], 1)

    def advance(self, num_tokens: int) -> None:
        """Count tokens whose states all layers now hold."""
        self.length += num_tokens

    def reorder(self, order: Tensor, *, source_moves: bool = True) -> None:
        """Make sequence i what sequence ``order[i]`` was, and forget what is padding in all.

        Args:
            order: (new batch size,) int64; a sequence may be repeated or left out.
            source_moves: False where each sequence reads the same source as the one that was in
                its place, so that nothing of the source needs to be copied.
        """
        if self._padding_BS is not None and self._positions_BS is not None:
            self._padding_BS = self._padding_BS[:, : self.length].index_select(0, order)
            self._positions_BS = self._positions_BS[:, : self.length].index_select(0, order)
        self.batch_size = order.shape[0]
        self._drop_common_padding()
        for layer in self.layers:
            if isinstance(layer, BlockState) and not source_moves:
                layer.mixer.reorder(order)
            else:
                layer.reorder(order)
        if self.source is not None and source_moves:
            self.source = self.source.reorder(order).without_common_padding()
            for layer in self.layers:
                if isinstance(layer, BlockState) and isinstance(layer.cross, SourceCache):
                    layer.cross.keep_first(self.source.features_BMD.shape[1])

    def join(self, other: IncrementalState) -> None:
        """Append the sequences of another state of the same model, as if all had begun together.

        The other state must not be used any more. Both must have the same ``max_length``.

        Raises:
            ValueError: the limits differ, or one has read nothing, or only one has a source.
        """
        if self.max_length != other.max_length:
            raise ValueError(f"max_length {self.max_length} is not {other.max_length}")
        if self.length == 0 or other.length == 0:
            raise ValueError("a state that has read nothing cannot be joined")
        if (self.source is None) != (other.source is None):
            raise ValueError("sequences with and without a source cannot be joined")
        for layer, others in zip(self.layers, other.layers, strict=True):
            layer.join(others)
        if self.source is not None and other.source is not None:
            self.source = self.source.joined(other.source)
        self._join_places(other)

    def _join_places(self, other: IncrementalState) -> None:
        length = max(self.length, other.length)
        both = (self, other)
        padded = any(each._padding_BS is not None for each in both)
        if padded or self.length != other.length:
            sides = [(each._placed(), length - each.length) for each in both]
            self._padding_BS = torch.cat([F.pad(x, (n, 0), value=True) for (x, _), n in sides])
            self._positions_BS = torch.cat([F.pad(x, (n, 0)) for (_, x), n in sides])
        self.length = length
        self.batch_size += other.batch_size

    def _drop_common_padding(self) -> None:
        """Forget the first tokens, where they are padding in every sequence."""
        if self._padding_BS is None or self._positions_BS is None:
            return
        # Where the first real token of the sequence that begins first stands.
        count = int(self._padding_BS.long().cumprod(1).sum(1).min())
        for layer in self.layers if count else ():
            layer.drop_first(count)
        self._padding_BS = self._padding_BS[:, count:]
        self._positions_BS = self._positions_BS[:, count:]
        self.length -= count
        if not bool(self._padding_BS.any()):
            self._padding_BS = self._positions_BS = None
