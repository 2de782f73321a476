"""LongNet's attention, whose cost grows with the length of a sequence and not with its square.

B batch, T new tokens, S keys (cached and new), H heads, D model width, K = D / H width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from scalerun.modules.attention import Attention, AttentionInit, attend
from scalerun.modules.block_context import BlockContext
from scalerun.modules.dilated_cache import DilatedCache, NewTokens
from scalerun.modules.dilation import Dilation
from scalerun.modules.incremental_state import LayerState
from scalerun.modules.merged_attention import merge

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


class DilatedAttention(Attention):
    """Self-attention over several dilations of the sequence (Ding et al. 2023, arXiv:2307.02486).

    A branch (w, r) cuts the sequence into segments of w tokens; in each a head attends among every
    r-th token (equations 2 to 5), starting at an offset of its own (section 2.3). Branches are
    merged by the sums under their softmaxes (equations 9 and 10). The weights are those of
    :class:`Attention`. Padding, on either side, counts for nothing: segments count the real tokens
    of each row, which reads 0 where it is padding.

    Args:
        dim: D.
        num_heads: H, a divisor of D.
        init: how the projections start.
        dilation: the branches.
        dropout: rate of softmax weights set to 0 in training. It costs the fast kernel on a CPU.
        inner_norm: norm over the joined heads, before the output projection.
        multiway: give each projection a half of its own for either kind of token.
        tp_mesh: axis that the heads are spread over, or None.
    """

    reads_bias = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        init: AttentionInit,
        dilation: Dilation,
        dropout: float = 0.0,
        inner_norm: nn.Module | None = None,
        multiway: bool = False,
        tp_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(
            dim,
            num_heads,
            init=init,
            dropout=dropout,
            inner_norm=inner_norm,
            multiway=multiway,
            tp_mesh=tp_mesh,
        )
        self.dilation = dilation

    def mix(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, context: BlockContext) -> Tensor:
        padding_BT = context.padding_of_new(q_BHTK.shape[2])
        if context.start > 0:
            y_BHTK = self.mix_with_cached(q_BHTK, k_BHTK, v_BHTK, context)
        elif padding_BT is None:
            y_BHTK = self.mix_all(q_BHTK, k_BHTK, v_BHTK, context, None)
        else:
            # Real tokens first, in their order, so that segments count nothing else.
            order_B1T1 = padding_BT.long().argsort(dim=1, stable=True)[:, None, :, None]
            place_B1T1 = order_B1T1.argsort(2)
            q, k, v = (x.take_along_dim(order_B1T1, 2) for x in (q_BHTK, k_BHTK, v_BHTK))
            y_BHTK = self.mix_all(q, k, v, context, (~padding_BT).sum(1))
            y_BHTK = y_BHTK.take_along_dim(place_B1T1, 2)
        if padding_BT is not None:
            y_BHTK = y_BHTK.masked_fill(padding_BT[:, None, :, None], 0.0)
        return y_BHTK

    def mix_all(
        self,
        q_BHTK: Tensor,
        k_BHTK: Tensor,
        v_BHTK: Tensor,
        context: BlockContext,
        lengths_B: Tensor | None,
    ) -> Tensor:
        """What each token reads where there are no cached ones: (B, H, T, K).

        Args:
            lengths_B: real tokens of each row, which are its first ones; None if all are.
        """
        if isinstance(context.state, DilatedCache):
            context.state.fill(k_BHTK, v_BHTK, lengths_B)
        q_BTHK, k_BTHK, v_BTHK = (x.transpose(1, 2) for x in (q_BHTK, k_BHTK, v_BHTK))
        y_BTHK = merge(
            q_BTHK,
            k_BTHK,
            v_BTHK,
            self.dilation.segments(
                q_BTHK, causal=context.causal, lengths_B=lengths_B, heads=self.heads_here
            ),
            dropout=self.dropout if self.training else 0.0,
            merge_gradient=self.dilation.merge_gradient,
        )
        return y_BTHK.transpose(1, 2)

    def mix_with_cached(
        self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, context: BlockContext
    ) -> Tensor:
        """What each new token reads where there are cached ones: (B, H, T, K)."""
        cache, positions_BT = context.state, context.positions_BT
        assert isinstance(cache, DilatedCache)
        assert positions_BT is not None
        num_tokens = q_BHTK.shape[2]
        padding_BT = context.padding_of_new(num_tokens)
        length_B = torch.full((1,), context.start, device=q_BHTK.device)
        if context.padding_BS is not None:
            length_B = (~context.padding_BS[:, : context.start]).sum(1)
        pieces = []
        for first in range(0, num_tokens, cache.chunk):
            chunk = slice(first, first + cache.chunk)
            q, k, v = (x[:, :, chunk] for x in (q_BHTK, k_BHTK, v_BHTK))
            padding = None if padding_BT is None else padding_BT[:, chunk]
            new = NewTokens(positions_BT[:, chunk], length_B, padding)
            k_BHSK, v_BHSK = cache.append(k, v)
            pieces.append(self.mix_counted(q, k_BHSK, v_BHSK, cache.counts(new)))
            cache.store(new)
            length_B = new.lengths_after()
        return torch.cat(pieces, 2)

    def mix_counted(
        self, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, counts_BHTS: Tensor
    ) -> Tensor:
        """What queries read of keys that each count so often: (B, H, T, K).

        One softmax over all branches, where a key counts ``e**bias`` times.
        """
        empty_BHT1 = (counts_BHTS == 0).all(-1, keepdim=True)
        bias_BHTS = torch.where(empty_BHT1, 0.0, counts_BHTS.to(q_BHTK.dtype).log())
        dropout = self.dropout if self.training else 0.0
        y_BHTK = attend(q_BHTK, k_BHSK, v_BHSK, bias_BHTS=bias_BHTS, dropout=dropout)
        return y_BHTK.masked_fill(empty_BHT1, 0.0)

    def init_state(self, batch_size: int, max_length: int) -> LayerState:
        return DilatedCache(self.dilation, self.heads_here, max_length)

    def mixing_flops_per_token(self, sequence_length: int) -> int:
        return round(12 * self.dim * self.dilation.keys_per_query(sequence_length))
