"""Which tokens attend to which in LongNet (Ding et al. 2023, arXiv:2307.02486).

B batch, T tokens, H heads, K width of a head, N segments, L tokens of a segment, R dilation ratio,
M = L / R tokens of a segment that one head keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scalerun.modules.attention_lse import Options
from scalerun.modules.megatron.heads import Heads
from scalerun.modules.merged_attention import MERGE_GRADIENTS

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

    def segments(
        self,
        x_BTHK: Tensor,
        *,
        causal: bool,
        lengths_B: Tensor | None = None,
        heads: Heads | None = None,
    ) -> list[Segments]:
        """The branches, cut for sequences like ``x_BTHK``: at most two pieces for each.

        Args:
            causal: a query sees no later token.
            lengths_B: (B,) int64, real tokens of each row, which are its first ones. None if all
                are real. Results at other tokens mean nothing.
            heads: which heads those are; None if they are all.
        """
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
        return part.reshape(-1, self.num_tokens, *part.shape[2:])

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
