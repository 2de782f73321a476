"""What dilated attention remembers between calls: the current segment of each branch, thinned out.

B batch, H heads, T new tokens, S slots, R branches, K width of a head.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from scalerun.modules.dilation import Dilation
from scalerun.modules.incremental_state import LayerState
from scalerun.modules.megatron.heads import Heads

CHUNK = 128
"""New tokens that are compared with each other at once."""


class Slots(NamedTuple):
    """What each slot is for."""

    length_S: Tensor
    """Segment length of its branch."""
    ratio_S: Tensor
    """Ratio of its branch."""
    place_HS: Tensor
    """Where in a segment the token stands that a head keeps there."""
    phase_HS: Tensor
    """The same modulo the ratio: the head's offset."""


class NewTokens(NamedTuple):
    """Where new tokens stand."""

    positions_BT: Tensor
    """(B or 1, T) int64, counted in real tokens."""
    lengths_B: Tensor
    """(B or 1,) int64, real tokens of each row before them."""
    padding_BT: Tensor | None = None
    """(B, T) bool, which of them are padding; None if none is."""

    def lengths_after(self) -> Tensor:
        """(B or 1,) int64, real tokens of each row, these included."""
        if self.padding_BT is None:
            return self.lengths_B + self.positions_BT.shape[1]
        return self.lengths_B + (~self.padding_BT).sum(1)


class DilatedCache(LayerState):
    """For each branch (w, r) and head, the w / r keys of the segment that sequences are in.

    A token of the segment has its slot, so that the next segment overwrites this one. The memory
    grows until the longest segment is full, and then no more. The last slots hold the keys of one
    call, which their queries read before they are put in their places.

    Args:
        dilation: the branches.
        heads: the H heads whose keys they are.
        max_length: tokens that a sequence may reach.
    """

    def __init__(self, dilation: Dilation, heads: Heads, max_length: int) -> None:
        self.dilation = dilation
        self.heads = heads
        self.max_length = max_length
        self.length = 0
        """Tokens (padding included) that were read."""
        self.sizes = self._sizes(0)
        """Slots of each branch."""
        self.chunk = min(CHUNK, max_length)
        self.keys_BHSK: Tensor | None = None
        self.values_BHSK: Tensor | None = None
        self.slots: Slots | None = None

    @property
    def num_slots(self) -> int:
        """Slots of all branches."""
        return sum(self.sizes)

    def _sizes(self, num_tokens: int) -> list[int]:
        """Slots that each branch needs for a sequence of so many tokens."""
        longest = min(max(num_tokens, 1), self.max_length)
        return [-(-min(w, longest) // r) for w, r in self.dilation.branches()]

    def _resize(self, sizes: list[int]) -> None:
        """Carry all slots over into branches of other sizes, none of them smaller."""
        ahead = [new - old for new, old in zip(sizes, self.sizes, strict=True)]

        def moved(old_BHSK: Tensor | None) -> Tensor:
            assert old_BHSK is not None
            parts = old_BHSK.split([*self.sizes, self.chunk], 2)
            grown = [F.pad(part, (0, 0, 0, n)) for part, n in zip(parts, [*ahead, 0], strict=True)]
            return torch.cat(grown, 2)

        if any(ahead):
            self.keys_BHSK, self.values_BHSK = moved(self.keys_BHSK), moved(self.values_BHSK)
            self.sizes, self.slots = sizes, None

    def fill(self, k_BHTK: Tensor, v_BHTK: Tensor, lengths_B: Tensor | None) -> None:
        """Take over the first tokens of all sequences.

        Args:
            lengths_B: real tokens of each row, which are its first ones; None if all are.
        """
        batch, _, num_tokens, width = k_BHTK.shape
        self.length = num_tokens
        self.sizes, self.slots = self._sizes(2 * num_tokens), None
        slots = self.slots_on(k_BHTK.device)
        if lengths_B is None:
            lengths_B = torch.full((1,), num_tokens, device=k_BHTK.device)
        start_BS = lengths_B[:, None] // slots.length_S * slots.length_S
        token_BHS = (start_BS[:, None] + slots.place_HS).clamp_max(num_tokens - 1)
        token_BHSK = token_BHS.unsqueeze(-1).expand(batch, -1, -1, width)
        shape = (batch, self.heads.count, self.num_slots + self.chunk, width)
        self.keys_BHSK, self.values_BHSK = k_BHTK.new_zeros(shape), v_BHTK.new_zeros(shape)
        self.keys_BHSK[:, :, : self.num_slots] = k_BHTK.gather(2, token_BHSK)
        self.values_BHSK[:, :, : self.num_slots] = v_BHTK.gather(2, token_BHSK)

    def append(self, k_BHTK: Tensor, v_BHTK: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values that the next tokens may see, their own last.

        :meth:`store` has to follow, after the queries have read them.
        """
        assert self.keys_BHSK is not None
        assert self.values_BHSK is not None
        self.length += k_BHTK.shape[2]
        if self._sizes(self.length) > self.sizes:
            self._resize(self._sizes(2 * self.length))
        end = self.num_slots + k_BHTK.shape[2]
        self.keys_BHSK[:, :, self.num_slots : end] = k_BHTK
        self.values_BHSK[:, :, self.num_slots : end] = v_BHTK
        return self.keys_BHSK[:, :, :end], self.values_BHSK[:, :, :end]

    def counts(self, new: NewTokens) -> Tensor:
        """How often each new query sees each key of :meth:`append`: (B, H, T, S + T) int64.

        A key that several branches see counts as often.
        """
        positions_BT, lengths_B, padding_BT = new
        slots = self.slots_on(positions_BT.device)
        segment_BS = lengths_B[:, None] // slots.length_S
        left_BS = lengths_B[:, None] - segment_BS * slots.length_S
        written_BHS = slots.place_HS < left_BS[:, None]
        same_BTS = positions_BT[:, :, None] // slots.length_S == segment_BS[:, None]
        phase_BTS = positions_BT[:, :, None] % slots.ratio_S
        cached_BHTS = (phase_BTS[:, None] == slots.phase_HS[:, None]) & (
            same_BTS[:, None] & written_BHS[:, :, None]
        )
        new_BHTT = self._counts_of_new(positions_BT)
        earlier_TT = torch.ones_like(new_BHTT[0, 0], dtype=torch.bool).tril()
        new_BHTT = new_BHTT * earlier_TT
        if padding_BT is not None:
            new_BHTT = new_BHTT * ~padding_BT[:, None, None, :]
        return torch.cat((cached_BHTS.to(new_BHTT.dtype), new_BHTT), -1)

    def _counts_of_new(self, positions_BT: Tensor) -> Tensor:
        """In how many branches two new tokens are kept by a head, in one segment: (B, H, T, T)."""
        total: Tensor | int = 0
        for length, ratio in self.dilation.branches():
            offset_H = self.offsets(ratio, positions_BT.device)
            kept_BHT = positions_BT[:, None] % ratio == offset_H[:, None]
            segment_BT = positions_BT // length
            same_BTT = segment_BT[:, :, None] == segment_BT[:, None]
            pair_BHTT = kept_BHT[..., None] & kept_BHT[:, :, None] & same_BTT[:, None]
            total = total + pair_BHTT.long()
        assert isinstance(total, Tensor)
        return total

    def store(self, new: NewTokens) -> None:
        """Put the tokens of the last :meth:`append` in their places."""
        positions_BT, _, padding_BT = new
        lengths_B = new.lengths_after()
        assert self.keys_BHSK is not None
        assert self.values_BHSK is not None
        batch, num_tokens = self.keys_BHSK.shape[0], positions_BT.shape[1]
        first, places = 0, []
        for (length, ratio), size in zip(self.dilation.branches(), self.sizes, strict=True):
            offset_H = self.offsets(ratio, positions_BT.device)
            current_BT = positions_BT // length == (lengths_B // length)[:, None]
            if padding_BT is not None:
                current_BT = current_BT & ~padding_BT
            kept_BHT = (positions_BT[:, None] % ratio == offset_H[:, None]) & current_BT[:, None]
            slot_BT = positions_BT % length // ratio + first
            # What has no place goes over a new token's own slot, whose content is used up.
            places.append(torch.where(kept_BHT, slot_BT[:, None], self.num_slots))
            first += size
        place_BHT = torch.cat(places, -1).expand(batch, -1, -1)
        for memory_BHSK in (self.keys_BHSK, self.values_BHSK):
            new_BHTK = memory_BHSK[:, :, self.num_slots : self.num_slots + num_tokens]
            copies_BHTK = new_BHTK.repeat(1, 1, len(places), 1)
            memory_BHSK.scatter_(2, place_BHT.unsqueeze(-1).expand_as(copies_BHTK), copies_BHTK)

    def slots_on(self, device: torch.device) -> Slots:
        """The tables, made once."""
        if self.slots is None or self.slots.length_S.device != device:
            sizes = torch.tensor(self.sizes, device=device)
            lengths, ratios = (
                torch.tensor(numbers, device=device).repeat_interleave(sizes)
                for numbers in (self.dilation.segment_lengths, self.dilation.ratios)
            )
            number_S = torch.cat([torch.arange(size, device=device) for size in self.sizes])
            offset_RH = torch.stack([self.offsets(ratio, device) for ratio in self.dilation.ratios])
            phase_HS = offset_RH.repeat_interleave(sizes, 0).T
            self.slots = Slots(lengths, ratios, number_S * ratios + phase_HS, phase_HS)
        return self.slots

    def offsets(self, ratio: int, device: torch.device) -> Tensor:
        """(H,) int64, the first token of a segment that each head keeps."""
        return self.dilation.offsets(self.heads.total, ratio, device)[self.heads.own]

    def reorder(self, order: Tensor) -> None:
        if self.keys_BHSK is not None and self.values_BHSK is not None:
            self.keys_BHSK = self.keys_BHSK.index_select(0, order)
            self.values_BHSK = self.values_BHSK.index_select(0, order)

    def join(self, other: Self) -> None:
        assert self.keys_BHSK is not None
        assert self.values_BHSK is not None
        assert other.keys_BHSK is not None
        assert other.values_BHSK is not None
        sizes = list(map(max, self.sizes, other.sizes))
        self._resize(sizes)
        other._resize(sizes)
        self.length = max(self.length, other.length)
        self.keys_BHSK = torch.cat((self.keys_BHSK, other.keys_BHSK))
        self.values_BHSK = torch.cat((self.values_BHSK, other.values_BHSK))

    def drop_first(self, num_tokens: int) -> None:
        self.length -= num_tokens
