"""Retention inside a chunk of tokens, and from chunk to chunk (Sun et al. 2023, arXiv:2307.08621).

Head h keeps a factor g_h of what it knows from one token to the next, and divides by the square
root of c(n) = 1 + g + ... + g**(n-1) after n tokens.

B batch, C tokens of a chunk, H heads, K width of a head's queries and keys, V width of its values.
Counts and decays have a B of 1 where all rows agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def log_decays(num_heads: int, device: torch.device | None = None) -> Tensor:
    """Logarithm of each head's factor ``1 - 2**(-5-h)``: (H,) float32.

    It is formed in float32 as TorchScale forms it, so that heads from 20 on forget nothing.
    """
    exponents = -5 - torch.arange(num_heads, dtype=torch.float32, device=device)
    return torch.log(1 - 2**exponents)


@dataclass(frozen=True)
class Counts:
    """Tokens up to and including each token of a chunk, padding not counted."""

    here_BC: Tensor
    """Tokens of the chunk alone; 0 at padding ahead of its first real token."""
    all_BC: Tensor
    """Tokens of the whole sequence, at least 1."""
    with_padding: bool
    """Whether some tokens may be padding; else ``here_BC`` is 1, 2, 3, ..."""

    @classmethod
    def of(cls, positions_BC: Tensor, padding_BC: Tensor | None) -> Counts:
        """For tokens that stand at these positions of their sequences, from 0."""
        if padding_BC is None:
            here_BC = torch.arange(1, positions_BC.shape[1] + 1, device=positions_BC.device)[None]
        else:
            here_BC = (~padding_BC).cumsum(1)
        return cls(here_BC, positions_BC + 1, padding_BC is not None)

    def part(self, begin: int, end: int) -> Counts:
        """Tokens ``begin`` to ``end`` as a chunk of their own."""
        here_BC = self.here_BC[:, begin:end]
        if begin > 0:
            here_BC = here_BC - self.here_BC[:, begin - 1 : begin]
        return Counts(here_BC, self.all_BC[:, begin:end], self.with_padding)


class Decay:
    """Tables of one chunk, for each head.

    Args:
        num_heads: H.
        counts: of the chunk's tokens.
        dtype: of the tables, float32 or better.
    """

    def __init__(self, num_heads: int, counts: Counts, dtype: torch.dtype) -> None:
        self.log_H1 = log_decays(num_heads, counts.here_BC.device).to(dtype)[:, None]
        self.here_B1C = counts.here_BC[:, None].to(dtype)
        self.all_B1C = counts.all_BC[:, None].to(dtype)
        self.dtype = dtype

    def root(self, count_B1C: Tensor) -> Tensor:
        """``sqrt(c(count))`` (B, H, C), and 1 for count 0."""
        count_B1C = count_B1C.clamp_min(1.0)
        sum_BHC = torch.expm1(count_B1C * self.log_H1) / torch.expm1(self.log_H1)
        return torch.where(self.log_H1 == 0.0, count_B1C, sum_BHC).sqrt()

    def root_here_BHC(self) -> Tensor:
        """Root of c for the tokens of the chunk alone."""
        return self.root(self.here_B1C)

    def root_all_BHC(self) -> Tensor:
        """Root of c for all tokens so far."""
        return self.root(self.all_B1C)

    def root_before_BH1(self) -> Tensor:
        """Root of c for the tokens ahead of the chunk; 1 if there are none."""
        return self.root(self.all_B1C[..., :1] - self.here_B1C[..., :1])

    def within_BHCC(self) -> Tensor:
        """From each token (last index) to itself and each later one, over ``root_here``."""
        distance_B1CC = self.here_B1C[..., :, None] - self.here_B1C[..., None, :]
        kept_BHCC = torch.exp(distance_B1CC * self.log_H1[..., None])
        return torch.tril(kept_BHCC) / self.root_here_BHC()[..., None]

    def from_memory_BHC(self) -> Tensor:
        """From the memory ahead of the chunk to each token, over ``root_here``."""
        kept_BHC = torch.exp(self.here_B1C * self.log_H1)
        return kept_BHC * self.root_before_BH1() / self.root_here_BHC()

    def into_memory_BHC(self) -> Tensor:
        """From each token to the memory after the chunk."""
        kept_BHC = torch.exp((self.here_B1C[..., -1:] - self.here_B1C) * self.log_H1)
        return kept_BHC / self.root_all_BHC()[..., -1:]

    def of_memory_BH1(self) -> Tensor:
        """From the memory ahead of the chunk to the memory after it."""
        kept_BH1 = torch.exp(self.here_B1C[..., -1:] * self.log_H1)
        return kept_BH1 * self.root_before_BH1() / self.root_all_BHC()[..., -1:]


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """What tables and memories are kept in when a model computes in ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Chunk:
    """The parallel form of some tokens that follow what a memory holds.

    Args:
        q_BHCK: rotated queries.
        k_BHCK: rotated and scaled keys, 0 at padding.
        v_BHCV: values.
        decay: tables of these tokens.
        within_BHCC: ``decay.within_BHCC()``, or that of another chunk with the same counts.
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
        self.weights_BHCC = (q_BHCK @ k_BHCK.mT) * within_BHCC.to(q_BHCK.dtype)

    def read(self) -> Tensor:
        """What each query reads, over the root of the chunk's own c: (B, H, C, V)."""
        o_BHCV = (self.weights_BHCC @ self.v_BHCV).to(self.decay.dtype)
        if self.memory_BHKV is None:
            return o_BHCV
        q_BHCK = self.q_BHCK * self.decay.from_memory_BHC()[..., None]
        dtype = self.q_BHCK.dtype
        return o_BHCV + q_BHCK.to(dtype) @ self.memory_BHKV.to(dtype)

    def correction_BHC1(self) -> Tensor:
        """From the root of the chunk's own c to that of all tokens: a factor of what is read."""
        return (self.decay.root_here_BHC() / self.decay.root_all_BHC())[..., None]

    def memory_after(self) -> Tensor:
        """M after the chunk."""
        decay = self.decay
        v_BHCV = self.v_BHCV * decay.into_memory_BHC()[..., None].to(self.v_BHCV.dtype)
        new_BHKV = (self.k_BHCK.mT @ v_BHCV).to(decay.dtype)
        if self.memory_BHKV is None:
            return new_BHKV
        return torch.addcmul(new_BHKV, self.memory_BHKV, decay.of_memory_BH1()[..., None])

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
        root_BH1 = decay.root(torch.full_like(decay.here_B1C[..., :1], chunk_size))
        memory_BH1V = self.memory_BHKV.abs().sum(-2, keepdim=True)
        largest_BH11 = memory_BH1V.amax(-1, keepdim=True)
        scale_BH11 = (decay.root_before_BH1() / root_BH1.square())[..., None]
        return torch.maximum(sum_BHC1, largest_BH11 * scale_BH11)
