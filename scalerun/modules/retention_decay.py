"""Tables of retention, which all layers of a model share (Sun et al. 2023, arXiv:2307.08621).

Head h keeps a factor g_h of what it knows from one token to the next, and divides by the square
root of c(n) = 1 + g + ... + g**(n-1) after n tokens. Tables are float32 or better, whatever the
model computes in: positions and decays of long texts cannot be told apart in half precision.

B batch (or 1 where all rows agree), T new tokens, C tokens of a chunk, H heads, K width of a head's
queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scalerun.modules.positions.base_position import Rotation


def angles(head_dim: int, device: torch.device | None = None) -> Tensor:
    """Radians that each pair of features turns by in one token: (K / 2,) float32.

    From 1 to 1/10000, both ends included; rotary positions are spaced otherwise.
    """
    return 1.0 / (10000 ** torch.linspace(0, 1, head_dim // 2, device=device))


def log_decays(num_heads: int, device: torch.device | None = None) -> Tensor:
    """Logarithm of each head's factor ``1 - 2**(-5-h)``: (H,) float32.

    It is formed in float32 as TorchScale forms it, so that heads from 20 on forget nothing.
    """
    exponents = -5 - torch.arange(num_heads, dtype=torch.float32, device=device)
    return torch.log(1 - 2**exponents)


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """What tables and memories are kept in when a model computes in ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Decay:
    """Tables of a chunk that follows what a memory holds.

    Args:
        log_H1: logarithms of the factors.
        positions_BC: positions of the tokens in their sequences, from 0; that of padding is that of
            the last token before it, or 0.
        padding_BC: which tokens are padding, or None if none is.
    """

    def __init__(self, log_H1: Tensor, positions_BC: Tensor, padding_BC: Tensor | None) -> None:
        self.log_H1 = log_H1
        self.total_B1C = (positions_BC[:, None] + 1).to(log_H1.dtype)
        """Tokens up to and including each."""
        after_B11 = self.total_B1C[..., -1:]
        if padding_BC is None:
            before_B11 = self.total_B1C[..., :1] - 1
        else:
            before_B11 = after_B11 - (~padding_BC).sum(1)[:, None, None]
        here_B1C = self.total_B1C - before_B11
        root_total_BHC = self.root(self.total_B1C)
        root_after_BH1 = root_total_BHC[..., -1:]
        self.root_before_BH1 = self.root(before_B11)
        """Root of c for the tokens ahead of the chunk."""
        self.root_here_BHC = self.root(here_B1C)
        """Root of c for the tokens of the chunk alone."""
        kept_BHC = self.power(here_B1C)
        from_memory_BHC = kept_BHC * self.root_before_BH1 / self.root_here_BHC
        of_memory_BH1 = kept_BHC[..., -1:] * self.root_before_BH1 / root_after_BH1
        into_memory_BHC = self.power(after_B11 - self.total_B1C) / root_after_BH1
        self.from_memory_BHC1 = from_memory_BHC[..., None]
        """Factor of the memory in what each token reads, over ``root_here``."""
        self.of_memory_BH11 = of_memory_BH1[..., None]
        """Factor of the memory in the memory after the chunk."""
        self.into_memory_BHC1 = into_memory_BHC[..., None]
        """Factor of each token in the memory after the chunk."""
        self.correction_BHC1 = (self.root_here_BHC / root_total_BHC)[..., None]
        """From ``root_here`` to the root of c for all tokens so far."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the tables: float32 or better."""
        return self.log_H1.dtype

    def power(self, exponent_B1C: Tensor) -> Tensor:
        """``g ** exponent``: (B, H, C)."""
        return torch.exp(exponent_B1C * self.log_H1)

    def root(self, count_B1C: Tensor) -> Tensor:
        """``sqrt(c(count))``: (B, H, C). It is 1 for a count of 0, where nothing is known yet."""
        count_B1C = count_B1C.clamp_min(1.0)
        sum_BHC = torch.expm1(count_B1C * self.log_H1) / torch.expm1(self.log_H1)
        return torch.where(self.log_H1 == 0.0, count_B1C, sum_BHC).sqrt()

    def within_BHCC(self) -> Tensor:
        """Factor of each token (last index) in itself and each later one, over ``root_here``."""
        distance_B1CC = self.total_B1C[..., :, None] - self.total_B1C[..., None, :]
        kept_BHCC = torch.exp(distance_B1CC * self.log_H1[..., None])
        return torch.tril(kept_BHCC) / self.root_here_BHC[..., None]


@dataclass(frozen=True)
class RetentionTables(Rotation):
    """Tables of the new tokens, made once for all layers. Keys come out over ``sqrt(K)``."""

    chunks: tuple[Decay, ...]
    """One for each chunk, in order."""
    within_BHCC: tuple[Tensor, ...]
    """``within_BHCC()`` of each chunk, in the type that the model computes in."""


def retention_tables(
    positions_BT: Tensor,
    padding_BT: Tensor | None,
    *,
    num_heads: int,
    head_dim: int,
    chunk_size: int | None,
    dtype: torch.dtype,
    own: slice = slice(None),
) -> RetentionTables:
    """Tables for new tokens that stand at these positions.

    Args:
        positions_BT: as in :class:`Decay`.
        padding_BT: which tokens are padding, or None if none is.
        num_heads: all heads of a layer.
        head_dim: K.
        chunk_size: C; None for one chunk.
        dtype: what the model computes in.
        own: the H heads among them that the tables are for.
    """
    device, num_tokens = positions_BT.device, positions_BT.shape[1]
    angle = positions_BT.float()[:, None, :, None] * angles(head_dim, device)
    turn = torch.stack((angle.cos(), angle.sin()), dim=-1)
    log_H1 = log_decays(num_heads, device)[own].to(table_dtype(dtype))[:, None]
    size = chunk_size or num_tokens
    chunks: list[Decay] = []
    within: list[Tensor] = []
    for begin in range(0, num_tokens, size):
        end = min(begin + size, num_tokens)
        padding_BC = None if padding_BT is None else padding_BT[:, begin:end]
        decay = Decay(log_H1, positions_BT[:, begin:end], padding_BC)
        if within and padding_BC is None:
            # Chunks of equal length have equal tables, and a shorter one the corner of them.
            within.append(within[0][..., : end - begin, : end - begin])
        else:
            within.append(decay.within_BHCC().to(dtype))
        chunks.append(decay)
    return RetentionTables(turn, turn * head_dim**-0.5, tuple(chunks), tuple(within))
