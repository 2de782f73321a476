"""Which tokens attend to which in LongNet (Ding et al. 2023, arXiv:2307.02486).

B batch, T tokens, H heads, K width of a head, N segments, L tokens of a segment, R dilation ratio,
M = L / R tokens of a segment that one head keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from scalerun.modules.attention_lse import Options
from scalerun.modules.key_exchange import KeyExchange
from scalerun.modules.megatron.heads import Heads
from scalerun.modules.merged_attention import MERGE_GRADIENTS, Keys

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

HEAD_OFFSETS = ("block", "mod")


@dataclass(frozen=True)
class Dilation:
    """Branches of dilated attention: a head of branch (w, r) keeps every r-th token of w.

    Args:
        segment_lengths: w of each branch, in tokens; the last segment of a sequence may be shorter.
        ratios: r of each branch, a divisor of its w.
        head_offset: the first token of a segment that a head keeps. ``mod``: head h starts at
            h mod r, as in the paper; ``block``: at h // ceil(H / r), as in TorchScale, so that
            neighbouring heads keep the same tokens.
        zero_keys: a query that sees later tokens also sees the zeros that fill up the last
            segment: each adds 1 to the softmax denominator. A defect of TorchScale, for weights
            that were trained with it.
        merge_gradient: ``torchscale`` or ``exact``, as in
            :func:`scalerun.modules.merged_attention.merge`.
    """

    segment_lengths: tuple[int, ...]
    ratios: tuple[int, ...]
    head_offset: str = "block"
    zero_keys: bool = False
    merge_gradient: str = "torchscale"

    def __post_init__(self) -> None:
        if not self.segment_lengths or len(self.segment_lengths) != len(self.ratios):
            raise ValueError("give one dilation ratio for each segment length, and at least one")
        for length, ratio in self.branches():
            if ratio < 1 or length < 1 or length % ratio:
                raise ValueError(f"segment length {length} is no multiple of its ratio {ratio}")
        if self.head_offset not in HEAD_OFFSETS:
            raise ValueError(f"head_offset is {self.head_offset!r}; give block or mod")
        if self.merge_gradient not in MERGE_GRADIENTS:
            raise ValueError(f"merge_gradient is {self.merge_gradient!r}; give torchscale or exact")

    def branches(self) -> list[tuple[int, int]]:
        """Segment length and ratio of each branch."""
        return list(zip(self.segment_lengths, self.ratios, strict=True))

    def offsets(self, num_heads: int, ratio: int, device: torch.device) -> Tensor:
        """(H,) int64, the first token of a segment that each of all heads keeps."""
        heads = torch.arange(num_heads, device=device)
        return heads % ratio if self.head_offset == "mod" else heads // -(-num_heads // ratio)

    def keys_per_query(self, num_tokens: int) -> float:
        """Keys that a head's token has in a sequence, in the mean over all tokens.

        A head keeps one token in r, as query and as key. Keys after the query count.
        """
        return sum(min(length, num_tokens) / ratio**2 for length, ratio in self.branches())

    def fits(self, slice_length: int, num_ranks: int) -> bool:
        """Whether ranks may each have a slice of so many tokens of a sequence, in their order.

        The segments of a branch have to lie within slices, or be made of whole slices whose first
        tokens the heads that keep every r-th one count alike.
        """
        return all(
            slice_length % ratio == 0
            and (
                slice_length % length == 0
                or length % slice_length == 0
                or length >= slice_length * num_ranks
            )
            for length, ratio in self.branches()
        )

    def slice_length(self, num_tokens: int, num_ranks: int) -> int:
        """The shortest slices that :meth:`fits` and that hold ``num_tokens`` together."""
        shortest = -(-num_tokens // num_ranks)
        step, whole = math.lcm(*self.ratios), math.lcm(*self.segment_lengths)
        first = -(-shortest // step) * step
        for length in range(first, max(self.segment_lengths) + 1, step):
            if self.fits(length, num_ranks):
                return length
        # Slices that are longer than any segment have to hold whole ones.
        above = max(shortest, max(self.segment_lengths))
        return -(-above // whole) * whole

    def segments(
        self,
        x_BTHK: Tensor,
        *,
        causal: bool,
        lengths_B: Tensor | None = None,
        heads: Heads | None = None,
        sequence_mesh: DeviceMesh | None = None,
    ) -> list[Segments]:
        """The branches, cut for sequences like ``x_BTHK``: at most two pieces for each.

        Args:
            causal: a query sees no later token.
            lengths_B: (B,) int64, real tokens of each row, which are its first ones. None if all
                are real. Results at other tokens mean nothing.
            heads: which heads those are; None if they are all.
            sequence_mesh: axis whose ranks each have a slice of every sequence, of a length that
                :meth:`fits`. All of them have to attend at the same time.

        Raises:
            ValueError: slices of sequences have padding, zero keys or a length that does not fit.
        """
        if sequence_mesh is not None and (lengths_B is not None or self.zero_keys):
            raise ValueError("sequences that ranks share can have neither padding nor zero keys")
        if sequence_mesh is not None and not self.fits(x_BTHK.shape[1], sequence_mesh.size()):
            raise ValueError(f"{self} does not fit slices of {x_BTHK.shape[1]} tokens")
        num_tokens, num_heads = x_BTHK.shape[1:3]
        heads = heads or Heads(num_heads, 0, num_heads)
        pieces = []
        for length, ratio in self.branches():
            offsets = self.offsets(heads.total, ratio, x_BTHK.device)[heads.own]
            for start, count, size in self.cut(num_tokens, length, ratio):
                piece = Segments(start, count, size, ratio, offsets, num_tokens, causal)
                if not causal:
                    end = None if self.zero_keys else num_tokens
                    piece.hide(x_BTHK.shape[0], end=end, lengths_B=lengths_B)
                if sequence_mesh is not None and length > num_tokens:
                    shared = -(-length // num_tokens)
                    piece.exchange = KeyExchange(
                        sequence_mesh, ranks_per_segment=shared, causal=causal
                    )
                pieces.append(piece)
        return pieces

    def cut(self, num_tokens: int, length: int, ratio: int) -> list[tuple[int, int, int]]:
        """Start, number and length of equal segments that together are the whole sequence."""
        whole, rest = divmod(num_tokens, length)
        filled = -(-rest // ratio) * ratio
        if self.zero_keys:
            return [(0, 1, filled) if whole == 0 else (0, whole + (rest > 0), length)]
        pieces = [(0, whole, length)] if whole else []
        return [*pieces, (whole * length, 1, filled)] if rest else pieces


class Segments:
    """``count`` segments of ``length`` tokens that begin at ``start``, for every head.

    Args:
        start: first token.
        count: N.
        length: L, a multiple of R; the last segment may reach past the end of the sequence.
        ratio: R.
        offsets: (H,) int64, first token of a segment that each head keeps.
        num_tokens: T.
        causal: a query sees no later token.
    """

    def __init__(
        self,
        start: int,
        count: int,
        length: int,
        ratio: int,
        offsets: Tensor,
        num_tokens: int,
        causal: bool,
    ) -> None:
        self.start = start
        self.end = min(start + count * length, num_tokens)
        self.missing = start + count * length - self.end
        self.num_tokens = num_tokens
        self.count = count
        self.kept = length // ratio
        self.ratio = ratio
        self.offsets = offsets
        num_heads = len(offsets)
        self.choice = offsets * num_heads + torch.arange(num_heads, device=offsets.device)
        """(H,) int64, where each head's kept token is among R tokens of H heads."""
        self.causal = causal
        self.bias_bH1M: Tensor | None = None
        self.exchange: KeyExchange | None = None
        """Other ranks that have tokens of the same segment."""

    def take(self, x_BTHK: Tensor) -> Tensor:
        """The tokens that each head keeps: (B * N, H, M, K)."""
        rows = self.rows(self.window(x_BTHK))
        if self.ratio > 1:
            rows = rows.index_select(3, self.choice)
        return rows.flatten(0, 1).transpose(1, 2)

    def put(self, x_BTHK: Tensor, part_bHMK: Tensor) -> None:
        """Write a part into the places that :meth:`take` reads."""
        window = self.window(x_BTHK)
        self.rows(window).index_copy_(3, self.choice, self.unflatten(part_bHMK, x_BTHK))
        if self.missing:
            x_BTHK[:, self.start : self.end] = window[:, : -self.missing]

    def add(self, x_BTHK: Tensor, part_bHMK: Tensor) -> None:
        """Add a part to the places that :meth:`take` reads."""
        window = self.window(x_BTHK)
        part = self.unflatten(part_bHMK, x_BTHK)
        if self.ratio > 1:
            self.rows(window).index_add_(3, self.choice, part)
        else:
            self.rows(window).add_(part)
        if self.missing:
            x_BTHK[:, self.start : self.end] = window[:, : -self.missing]

    def whole(self, part_bHMK: Tensor) -> Tensor | None:
        """The part as (B, T, H, K) where it has every token of the sequence; None elsewhere."""
        if self.ratio > 1 or self.missing or self.start or self.end < self.num_tokens:
            return None
        part = part_bHMK.transpose(1, 2)
        return part.reshape(-1, self.num_tokens, *part.shape[2:]).contiguous()

    def window(self, x_BTHK: Tensor) -> Tensor:
        """(B, N * L, H, K): a view, or a copy filled up with zeros."""
        window = x_BTHK[:, self.start : self.end]
        return F.pad(window, (0, 0, 0, 0, 0, self.missing)) if self.missing else window

    def rows(self, window: Tensor) -> Tensor:
        """The same memory as (B, N, M, R * H, K)."""
        batch, _, num_heads, width = window.shape
        return window.view(batch, self.count, self.kept, self.ratio * num_heads, width)

    def unflatten(self, part_bHMK: Tensor, x_BTHK: Tensor) -> Tensor:
        """(B, N, M, H, K), of the type of ``x_BTHK``."""
        part = part_bHMK.to(x_BTHK.dtype).transpose(1, 2)
        return part.unflatten(0, (x_BTHK.shape[0], self.count))

    def hide(self, batch_size: int, *, end: int | None, lengths_B: Tensor | None) -> None:
        """Hide keys from ``end`` on, and those of each row from ``lengths_B`` on.

        A query that is left with nothing sees everything instead: it is padding itself, since each
        real one sees at least its own key.
        """
        if lengths_B is None and (end is None or not self.missing):
            return
        device = self.offsets.device
        segment_N = torch.arange(self.count, device=device) * self.kept * self.ratio + self.start
        kept_M = torch.arange(self.kept, device=device) * self.ratio
        keys_NHM = segment_N[:, None, None] + self.offsets[:, None] + kept_M
        hidden_BNHM = keys_NHM.new_zeros((batch_size, *keys_NHM.shape), dtype=torch.bool)
        if end is not None:
            hidden_BNHM |= keys_NHM >= end
        if lengths_B is not None:
            hidden_BNHM |= (keys_NHM >= lengths_B[:, None, None, None]) & (keys_NHM < self.end)
        hidden_BNHM &= ~hidden_BNHM.all(-1, keepdim=True)
        bias = hidden_BNHM.new_zeros(hidden_BNHM.shape, dtype=torch.float32)
        self.bias_bH1M = bias.masked_fill(hidden_BNHM, -math.inf).flatten(0, 1).unsqueeze(2)

    def options(self, dropout: float) -> Options:
        """How the kept tokens of a segment attend to each other."""
        return Options(self.bias_bH1M, self.causal, dropout)

    def keys(self, k_BTHK: Tensor, v_BTHK: Tensor, dropout: float) -> list[Keys]:
        """What the kept tokens of a segment see: each other, and those that other ranks have."""
        own = Keys(self.take(k_BTHK), self.take(v_BTHK), self.options(dropout))
        if self.exchange is None:
            return [own]
        borrowed = self.exchange.borrow(own.k_bHSK, own.v_bHSK)
        return [own] if borrowed is None else [own, Keys(*borrowed, Options(dropout=dropout))]

    def own_gradients(self, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Gradients of the kept keys and values, from those of each set of :meth:`keys`."""
        if self.exchange is None:
            return parts[0]
        return self.exchange.give_back(parts[0], parts[1] if len(parts) > 1 else None)
