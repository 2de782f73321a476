"""Retention inside a chunk of tokens, and from what came ahead of it (arXiv:2307.08621).

B batch, C tokens of the chunk, H heads, K width of a head's queries and keys, V width of its
values. Tables have a B of 1 where all rows agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scalerun.modules.retention_decay import Decay


class Chunk:
    """The parallel form of some tokens that follow what a memory holds.

    Args:
        q_BHCK: rotated queries.
        k_BHCK: rotated and scaled keys, 0 at padding.
        v_BHCV: values.
        decay: tables of these tokens.
        within_BHCC: ``decay.within_BHCC()``.
        memory_BHKV: M ahead of the chunk; None if nothing came.
    """

    def __init__(
        self,
        q_BHCK: Tensor,
        k_BHCK: Tensor,
        v_BHCV: Tensor,
        *,
        decay: Decay,
        within_BHCC: Tensor,
        memory_BHKV: Tensor | None,
    ) -> None:
        self.q_BHCK = q_BHCK
        self.k_BHCK = k_BHCK
        self.v_BHCV = v_BHCV
        self.decay = decay
        self.memory_BHKV = memory_BHKV
        self.weights_BHCC = (q_BHCK @ k_BHCK.mT) * within_BHCC
        """A: what each query (first index) takes of each value, over the root of the chunk's c."""

    def read(self) -> Tensor:
        """What each query reads, over the root of the chunk's own c: (B, H, C, V)."""
        o_BHCV = (self.weights_BHCC @ self.v_BHCV).to(self.decay.dtype)
        if self.memory_BHKV is None:
            return o_BHCV
        q_BHCK = self.q_BHCK * self.decay.from_memory_BHC1
        dtype = self.q_BHCK.dtype
        return o_BHCV + q_BHCK.to(dtype) @ self.memory_BHKV.to(dtype)

    def memory_after(self) -> Tensor:
        """M after the chunk."""
        decay = self.decay
        v_BHCV = self.v_BHCV * decay.into_memory_BHC1.to(self.v_BHCV.dtype)
        new_BHKV = (self.k_BHCK.mT @ v_BHCV).to(decay.dtype)
        if self.memory_BHKV is None:
            return new_BHKV
        return torch.addcmul(new_BHKV, self.memory_BHKV, decay.of_memory_BH11)

    @torch.no_grad()
    def magnitude_of_sum_BHC1(self) -> Tensor:
        """``|sum A|`` over the tokens of the chunk."""
        return self.weights_BHCC.sum(-1, keepdim=True, dtype=self.decay.dtype).abs()

    @torch.no_grad()
    def sum_of_magnitudes_BHC1(self) -> Tensor:
        """``sum |A|`` over the tokens of the chunk."""
        return self.weights_BHCC.abs().sum(-1, keepdim=True, dtype=self.decay.dtype)

    @torch.no_grad()
    def largest_sum_BHC1(self, chunk_size: int) -> Tensor:
        """The largest of 1, ``sum |A|``, and the sums of the memory's magnitudes over K.

        The memory counts as if it were divided by the c of a whole chunk, without a root.
        """
        sum_BHC1 = self.sum_of_magnitudes_BHC1().clamp_min(1.0)
        if self.memory_BHKV is None:
            return sum_BHC1
        decay = self.decay
        whole_BH11 = decay.root(decay.log_H1.new_full((1, 1, 1), chunk_size)).square()[..., None]
        memory_BHKV = self.memory_BHKV * (decay.root_before_BH1[..., None] / whole_BH11)
        return torch.maximum(
            sum_BHC1, memory_BHKV.abs().sum(-2, keepdim=True).amax(-1, keepdim=True)
        )
