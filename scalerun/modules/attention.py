"""Multi-head attention.

B batch, T new tokens, S keys (cached and new), D model width, H heads, K = D / H width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from scalerun.modules import flash_attn
from scalerun.modules.incremental_state import KVCache
from scalerun.modules.init import LinearInit
from scalerun.modules.linear import Linear
from scalerun.modules.mixer import BlockContext, Mixer


@dataclass(frozen=True)
class AttentionInit:
    """How the four projections start."""

    q: LinearInit
    k: LinearInit
    v: LinearInit
    out: LinearInit


def attend(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    *,
    bias_BHTS: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention with scale ``K**-0.5``: (B, H, T, K).

    Args:
        bias_BHTS: added to the scores, broadcast over B and H; every row needs a finite entry.
        causal: query t sees keys 0..t; only for T = S and without a bias.
        dropout: rate of softmax weights set to 0; 0 in evaluation.
    """
    if bias_BHTS is None and flash_attn.usable(q_BHTK):
        return flash_attn.flash_attention(q_BHTK, k_BHSK, v_BHSK, causal=causal, dropout=dropout)
    if bias_BHTS is not None:
        bias_BHTS = bias_BHTS.to(q_BHTK.dtype)
    return F.scaled_dot_product_attention(
        q_BHTK, k_BHSK, v_BHSK, attn_mask=bias_BHTS, dropout_p=dropout, is_causal=causal
    )


class Attention(Mixer):
    """Self-attention with four projections, all D -> D with bias (arXiv:1706.03762).

    Args:
        dim: D.
        num_heads: H, a divisor of D.
        init: how the projections start.
        dropout: rate of softmax weights set to 0 in training.
        inner_norm: norm over the joined heads, before the output projection (SubLN; Wang et al.
            2022, arXiv:2210.06423).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        init: AttentionInit,
        dropout: float = 0.0,
        inner_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"width {dim} is not a multiple of {num_heads} heads")
        self.dim = dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.q_proj = Linear(dim, dim, init=init.q)
        self.k_proj = Linear(dim, dim, init=init.k)
        self.v_proj = Linear(dim, dim, init=init.v)
        self.inner_norm = inner_norm
        self.out_proj = Linear(dim, dim, init=init.out)

    def forward(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        q_BHTK, k_BHSK, v_BHSK = self.project(x_BTD)
        if context.rotation is not None:
            q_BHTK, k_BHSK = context.rotation(q_BHTK, k_BHSK)
        if context.state is not None:
            assert isinstance(context.state, KVCache)
            k_BHSK, v_BHSK = context.state.append(k_BHSK, v_BHSK, start=context.start)
        y_BHTK = attend(
            q_BHTK,
            k_BHSK,
            v_BHSK,
            bias_BHTS=context.bias_BHTS,
            causal=context.causal,
            dropout=self.dropout if self.training else 0.0,
        )
        if context.empty_rows_B1T1 is not None:
            y_BHTK = y_BHTK.masked_fill(context.empty_rows_B1T1, 0.0)
        y_BTD = y_BHTK.transpose(1, 2).flatten(2)
        if self.inner_norm is not None:
            y_BTD = self.inner_norm(y_BTD)
        return self.out_proj(y_BTD)

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (B, H, T, K)."""
        # One product with the joined weights was never faster in training: its gradient has to be
        # copied together.
        shape = (*x_BTD.shape[:2], self.num_heads, self.dim // self.num_heads)
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x_BTD).view(shape).transpose(1, 2) for layer in layers)
        return q, k, v

    def init_state(self, batch_size: int, max_length: int) -> KVCache:
        return KVCache(max_length)

    def num_active_weights(self) -> int:
        return 4 * self.dim * self.dim

    def mixing_flops_per_token(self, sequence_length: int) -> int:
        return 12 * self.dim * sequence_length
