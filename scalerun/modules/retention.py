"""Multi-scale retention: attention without softmax, whose memory of the past has a fixed size.

Source: Sun et al. 2023, arXiv:2307.08621. With a head's factor g and c(n) = 1 + g + ... + g**(n-1),
the n-th token (from 1) reads

    o_n = sum_{m <= n} g**(n-m) (q_n . k_m) v_m / sqrt(c(n))

of rotated queries and keys; o is normed head by head, gated, and projected. The sum is formed in
three ways. *Parallel* writes down all pairs of tokens. *Recurrent* keeps the matrix
M_n = sum_{m <= n} g**(n-m) k_m v_m^T / sqrt(c(n)) and reads o_n = M_n^T q_n. *Chunkwise* is
parallel inside a chunk and reads M for what came ahead of it.

B batch, T new tokens, C tokens of a chunk, D model width, H heads, K = D / H width of a head's
queries and keys, V width of its values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from scalerun.modules.block_context import BlockContext
from scalerun.modules.incremental_state import LayerState
from scalerun.modules.init import LinearInit
from scalerun.modules.megatron.heads import own_heads
from scalerun.modules.megatron.layers import ColumnParallelLinear, RowParallelLinear
from scalerun.modules.megatron.mappings import enter
from scalerun.modules.mixer import Mixer
from scalerun.modules.retention_chunk import Chunk
from scalerun.modules.retention_decay import Decay, RetentionTables, retention_tables

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

NORM_EPS_MODES = ("scale_free", "torchscale", "torchscale_0.3.0")
"""What the head norm's eps is measured against; see :class:`Retention`."""

LARGEST_SUM = 5e4
"""TorchScale's bound, for half precision."""


@dataclass(frozen=True)
class RetentionInit:
    """How the five projections start; ``g`` is the gate."""

    q: LinearInit
    k: LinearInit
    v: LinearInit
    g: LinearInit
    out: LinearInit


class RetentionState(LayerState):
    """The matrix M of each head, as large after a million tokens as after one."""

    def __init__(self) -> None:
        self.memory_BHKV: Tensor | None = None
        """Float32 or better, whatever the model computes in: it adds up all tokens."""

    def reorder(self, order: Tensor) -> None:
        if self.memory_BHKV is not None:
            self.memory_BHKV = self.memory_BHKV.index_select(0, order)

    def join(self, other: Self) -> None:
        assert self.memory_BHKV is not None
        assert other.memory_BHKV is not None
        self.memory_BHKV = torch.cat((self.memory_BHKV, other.memory_BHKV))


class Retention(Mixer):
    """Queries and keys D -> D, values and gate D -> H * V, output H * V -> D, all without bias.

    Several tokens are computed in parallel or chunk by chunk, a single one after a state by the
    recurrent step. Padding contributes nothing, and positions count real tokens.

    The head norm takes a positive factor of its input away, up to its eps. With ``norm_eps_mode``
    *scale_free* its input is o as above in every form, so that the forms agree. TorchScale divides
    by another number in each form, and at small scores its logits depend on it (no gradient flows
    through it):

    - parallel: o over ``clamp(sum |A|, 1, 5e4)``, the sum being over a row of the weights A of the
      values; up to release 0.3.0, and in the paper, over ``max(|sum A|, 1)``;
    - chunkwise: A and o have the c of the chunk alone; o over the larger of ``max(sum |A|, 1)`` and
      the memory's largest sum of magnitudes over K;
    - recurrent: o. This holds for whatever extends a decoding state: it does not matter in which
      pieces a text is read.

    Args:
        dim: D.
        value_dim: H * V.
        num_heads: H.
        init: how the projections start.
        norm_eps: eps of the head norm.
        norm_eps_mode: one of ``NORM_EPS_MODES``.
        chunk_size: C; None for the parallel form, whose time and memory grow with T squared.
        tp_mesh: axis that the heads are spread over, or None.
    """

    reads_bias = False

    def __init__(
        self,
        dim: int,
        value_dim: int,
        num_heads: int,
        *,
        init: RetentionInit,
        norm_eps: float = 1e-6,
        norm_eps_mode: str = "scale_free",
        chunk_size: int | None = None,
        tp_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if dim % (2 * num_heads):
            raise ValueError(f"width {dim} is not an even multiple of {num_heads} heads")
        if value_dim % num_heads:
            raise ValueError(f"value width {value_dim} is not a multiple of {num_heads} heads")
        if norm_eps_mode not in NORM_EPS_MODES:
            raise ValueError(f"norm_eps_mode {norm_eps_mode!r} is none of {NORM_EPS_MODES}")
        self.dim = dim
        self.value_dim = value_dim
        self.num_heads = num_heads
        self.heads_here = own_heads(num_heads, tp_mesh)
        self.tp_mesh = tp_mesh
        self.norm_eps = norm_eps
        self.norm_eps_mode = norm_eps_mode
        self.chunk_size = chunk_size
        columns = partial(ColumnParallelLinear, dim, bias=False, tp_mesh=tp_mesh, copy_input=False)
        self.q_proj = columns(dim, init=init.q)
        self.k_proj = columns(dim, init=init.k)
        self.v_proj = columns(value_dim, init=init.v)
        self.g_proj = columns(value_dim, init=init.g)
        self.out_proj = RowParallelLinear(
            value_dim, dim, init=init.out, bias=False, tp_mesh=tp_mesh
        )

    def forward(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        x_BTD = enter(x_BTD, self.tp_mesh, context.time_mesh)
        layers, split = (self.q_proj, self.k_proj, self.v_proj), (self.heads_here.count, -1)
        q, k, v = (layer(x_BTD).unflatten(2, split).transpose(1, 2) for layer in layers)
        tables = context.rotation
        if not isinstance(tables, RetentionTables):
            tables = self.tables(context, x_BTD.shape[1], q.dtype)
        padding_BT = context.padding_of_new(x_BTD.shape[1])
        if padding_BT is not None:
            k = k.masked_fill(padding_BT[:, None, :, None], 0.0)
        q, k = tables(q, k)
        o_BHTV = self.retain(q, k, v, tables, context.state)
        o_BHTV = F.rms_norm(o_BHTV, o_BHTV.shape[-1:], None, self.norm_eps).to(v.dtype)
        y_BTD = F.silu(self.g_proj(x_BTD)) * o_BHTV.transpose(1, 2).flatten(2)
        return self.out_proj(y_BTD, context.time_mesh)

    def tables(self, context: BlockContext, num_tokens: int, dtype: torch.dtype) -> RetentionTables:
        """The tables of the new tokens, which layers of the same settings can share.

        They are taken from ``context.rotation`` when they are there.

        Args:
            dtype: what the layers compute in.
        """
        assert context.positions_BT is not None
        return retention_tables(
            context.positions_BT,
            context.padding_of_new(num_tokens),
            num_heads=self.num_heads,
            head_dim=self.dim // self.num_heads,
            chunk_size=self.chunk_size,
            dtype=dtype,
            own=self.heads_here.own,
        )

    def retain(
        self,
        q_BHTK: Tensor,
        k_BHTK: Tensor,
        v_BHTV: Tensor,
        tables: RetentionTables,
        state: LayerState | None,
    ) -> Tensor:
        """What each query reads: (B, H, T, V), float32 or better."""
        if state is None:
            return self.in_chunks(q_BHTK, k_BHTK, v_BHTV, tables)
        assert isinstance(state, RetentionState)
        if q_BHTK.shape[2] == 1:
            return self.step(q_BHTK, k_BHTK, v_BHTV, tables.chunks[0], state)
        return self.in_chunks(q_BHTK, k_BHTK, v_BHTV, tables, state)

    def step(
        self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTV: Tensor, decay: Decay, state: RetentionState
    ) -> Tensor:
        """The recurrent form of one token."""
        k_BHK1 = k_BHTK.to(decay.dtype).mT * decay.into_memory_BHC1
        v_BHTV = v_BHTV.to(decay.dtype)
        if state.memory_BHKV is None:
            state.memory_BHKV = k_BHK1 * v_BHTV
        else:
            kept_BHKV = state.memory_BHKV * decay.of_memory_BH11
            state.memory_BHKV = torch.addcmul(kept_BHKV, k_BHK1, v_BHTV)
        return (q_BHTK.to(decay.dtype) @ state.memory_BHKV).to(decay.dtype)

    def in_chunks(
        self,
        q_BHTK: Tensor,
        k_BHTK: Tensor,
        v_BHTV: Tensor,
        tables: RetentionTables,
        state: RetentionState | None = None,
    ) -> Tensor:
        """The chunkwise form, or the parallel one, which is that of a single chunk."""
        num_tokens = q_BHTK.shape[2]
        size = self.chunk_size or num_tokens
        memory_BHKV = None if state is None else state.memory_BHKV
        pieces = (x.split(size, 2) for x in (q_BHTK, k_BHTK, v_BHTV))
        read = []
        for i, (q, k, v, decay, within) in enumerate(
            zip(*pieces, tables.chunks, tables.within_BHCC, strict=True)
        ):
            chunk = Chunk(q, k, v, decay=decay, within_BHCC=within, memory_BHKV=memory_BHKV)
            o_BHCV = chunk.read()
            if state is None and self.norm_eps_mode != "scale_free":
                o_BHCV = o_BHCV / self.torchscale_divisor(chunk)
            elif memory_BHKV is not None:
                o_BHCV = o_BHCV * decay.correction_BHC1
            read.append(o_BHCV)
            if state is not None or i + 1 < len(tables.chunks):
                memory_BHKV = chunk.memory_after()
        if state is not None:
            state.memory_BHKV = memory_BHKV
        return torch.cat(read, 2) if len(read) > 1 else read[0]

    def torchscale_divisor(self, chunk: Chunk) -> Tensor:
        """What TorchScale divides the read values by in its form: (B, H, C, 1)."""
        if self.chunk_size is not None:
            return chunk.largest_sum_BHC1(self.chunk_size)
        if self.norm_eps_mode == "torchscale":
            return chunk.sum_of_magnitudes_BHC1().clamp(1.0, LARGEST_SUM)
        return chunk.magnitude_of_sum_BHC1().clamp_min(1.0)

    def init_state(self, batch_size: int, max_length: int) -> LayerState:
        return RetentionState()

    def num_active_weights(self) -> int:
        return 2 * self.dim * self.dim + 3 * self.dim * self.value_dim

    def mixing_flops_per_token(self, sequence_length: int) -> int:
        width = self.dim + self.value_dim
        if self.chunk_size is None or self.chunk_size >= sequence_length:
            return 6 * width * sequence_length
        memory = self.dim * self.value_dim // self.num_heads
        return 6 * width * self.chunk_size + 12 * memory
