"""Multi-head attention.

B batch, T new tokens, S keys (cached and new), D model width, H heads, K = D / H width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalerun.modules import flash_attn
from scalerun.modules.block_context import BlockContext
from scalerun.modules.incremental_state import KVCache, LayerState, SourceCache
from scalerun.modules.init import LinearInit
from scalerun.modules.joined_linear import joined, lay_together
from scalerun.modules.megatron.heads import own_heads
from scalerun.modules.megatron.layers import ColumnParallelLinear, RowParallelLinear
from scalerun.modules.megatron.mappings import copy_to, enter
from scalerun.modules.megatron.random import rank_stream
from scalerun.modules.mixer import Mixer
from scalerun.modules.multiway import Multiway, route
from scalerun.modules.norm import normed_inside

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


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
        multiway: give each projection a half of its own for either kind of token.
        tp_mesh: axis that the heads are spread over, and the inner norm with them; or None. What is
            below called H and D is then this rank's share.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        init: AttentionInit,
        dropout: float = 0.0,
        inner_norm: nn.Module | None = None,
        multiway: bool = False,
        tp_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"width {dim} is not a multiple of {num_heads} heads")
        self.dim = dim
        self.num_heads = num_heads
        self.heads_here = own_heads(num_heads, tp_mesh)
        self.dropout = dropout
        self.tp_mesh = tp_mesh
        columns = partial(ColumnParallelLinear, dim, dim, tp_mesh=tp_mesh, copy_input=False)
        self.q_proj = _projection(columns, init.q, multiway=multiway)
        self.k_proj = _projection(columns, init.k, multiway=multiway)
        self.v_proj = _projection(columns, init.v, multiway=multiway)
        self.inner_norm = inner_norm
        rows = partial(RowParallelLinear, dim, dim, tp_mesh=tp_mesh)
        self.out_proj = _projection(rows, init.out, multiway=multiway)

    def forward(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        q_BHTK, k_BHSK, v_BHSK = self.project(x_BTD, context)
        if context.rotation is not None:
            q_BHTK, k_BHSK = context.rotation(q_BHTK, k_BHSK)
        with self.random_numbers(x_BTD.device):
            y_BHTK = self.mix(q_BHTK, k_BHSK, v_BHSK, context)
        return self.join(y_BHTK, context)

    def project(self, x_BTD: Tensor, context: BlockContext) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the new tokens, each (B, H, T, K)."""
        state = context.state
        if isinstance(state, KVCache) and state.projections and _computes_plainly(x_BTD):
            q, k, v = self.heads(F.linear(x_BTD, *state.projections)).chunk(3, dim=1)
            return q, k, v
        # One product with the joined weights was never faster in training: its gradient has to be
        # copied together.
        x_BTD = enter(x_BTD, self.tp_mesh, context.time_mesh)
        q, k, v = (self.heads(route(layer, x_BTD, context)) for layer in self.projections())
        return q, k, v

    def projections(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """What makes queries, keys and values."""
        return self.q_proj, self.k_proj, self.v_proj

    def heads(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) as (B, H, T, K), or (B, T, 3 D) as (B, 3 H, T, K)."""
        batch, num_tokens, _ = x_BTD.shape
        return x_BTD.view(batch, num_tokens, -1, self.dim // self.num_heads).transpose(1, 2)

    def mix(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, context: BlockContext) -> Tensor:
        """What each query reads of the keys so far, the new ones included: (B, H, T, K)."""
        if context.state is not None:
            assert isinstance(context.state, KVCache)
            k_BHTK, v_BHTK = context.state.append(k_BHTK, v_BHTK, start=context.start)
        y_BHTK = attend(
            q_BHTK,
            k_BHTK,
            v_BHTK,
            bias_BHTS=context.bias_BHTS,
            causal=context.causal,
            dropout=self.dropout if self.training else 0.0,
        )
        if context.empty_rows_B1T1 is not None:
            y_BHTK = y_BHTK.masked_fill(context.empty_rows_B1T1, 0.0)
        return y_BHTK

    def join(self, y_BHTK: Tensor, context: BlockContext) -> Tensor:
        """The heads, normed if there is an inner norm, through the output projection."""
        y_BTD = y_BHTK.transpose(1, 2).flatten(2)
        if self.inner_norm is not None:
            y_BTD = normed_inside(self.inner_norm, y_BTD, self.tp_mesh, context)
        if context.time_mesh is not None:
            return self.out_proj(y_BTD, context.time_mesh)
        return route(self.out_proj, y_BTD, context)

    def random_numbers(self, device: torch.device) -> AbstractContextManager[None]:
        """Where softmax weights are dropped: the heads of each rank draw by themselves."""
        if self.tp_mesh is None or not self.training or self.dropout == 0.0:
            return nullcontext()
        return rank_stream(self.tp_mesh, device)

    def init_state(self, batch_size: int, max_length: int) -> LayerState:
        return KVCache(max_length, projections=joined(self.projections()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Whatever gives weights another memory (to, to_empty, half) comes by here. torch's
        # recurrent layers lay out theirs in the same place.
        super()._apply(fn, recurse)
        lay_together(self.projections())
        return self

    def num_active_weights(self) -> int:
        return 4 * self.dim * self.dim

    def mixing_flops_per_token(self, sequence_length: int) -> int:
        return 12 * self.dim * sequence_length


class CrossAttention(Attention):
    """Attention from the tokens of one sequence to another, encoded one: ``context.source``.

    No rotation is applied. With a decoding state the source is projected once.
    """

    def forward(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        source = context.source
        if source is None:
            raise ValueError("cross-attention has no source; hand the encoder's output in")
        k_BHMK, v_BHMK = self.project_source(source.features_BMD, context)
        x_BTD = enter(x_BTD, self.tp_mesh, context.time_mesh)
        with self.random_numbers(x_BTD.device):
            y_BHTK = attend(
                self.heads(self.q_proj(x_BTD)),
                k_BHMK,
                v_BHMK,
                bias_BHTS=source.bias_BHTM,
                dropout=self.dropout if self.training else 0.0,
            )
        if source.empty_rows_B1T1 is not None:
            y_BHTK = y_BHTK.masked_fill(source.empty_rows_B1T1, 0.0)
        return self.join(y_BHTK, context)

    def project_source(self, features_BMD: Tensor, context: BlockContext) -> tuple[Tensor, Tensor]:
        """Keys and values of the source, each (B, H, M, K)."""
        cache = context.state
        if isinstance(cache, SourceCache) and cache.keys_BHMK is not None:
            assert cache.values_BHMK is not None
            return cache.keys_BHMK, cache.values_BHMK
        features_BMD = copy_to(features_BMD, self.tp_mesh)
        k, v = (self.heads(layer(features_BMD)) for layer in (self.k_proj, self.v_proj))
        if isinstance(cache, SourceCache):
            cache.keys_BHMK, cache.values_BHMK = k, v
        return k, v

    def init_state(self, batch_size: int, max_length: int) -> LayerState:
        return SourceCache()


def _computes_plainly(x: Tensor) -> bool:
    """Whether weights are neither to get a gradient nor cast by autocast, which casts them once."""
    return not torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type)


def _projection(make: Callable[..., nn.Module], init: LinearInit, *, multiway: bool) -> nn.Module:
    """A layer D -> D with bias, or a pair of them."""
    return Multiway(make(init=init), make(init=init)) if multiway else make(init=init)
