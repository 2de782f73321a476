from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scalerun.modules.retention_chunk import Chunk
from scalerun.modules.retention_decay import Decay, log_decays

HEADS, TIME, KEYS, VALUES = 2, 9, 4, 3


def chunk_of(qkv: list[Tensor], begin: int, end: int, memory_BHKV: Tensor | None = None) -> Chunk:
    log_H1 = log_decays(HEADS).double()[:, None]
    decay = Decay(log_H1, torch.arange(begin, end)[None], None)
    q, k, v = (x[:, :, begin:end] for x in qkv)
    within = decay.within_BHCC()
    return Chunk(q, k, v, decay=decay, within_BHCC=within, memory_BHKV=memory_BHKV)


@pytest.fixture
def qkv() -> list[Tensor]:
    shapes = [(2, HEADS, TIME, width) for width in (KEYS, KEYS, VALUES)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_two_chunks_read_and_remember_what_one_does(cut: int, qkv: list[Tensor]) -> None:
    whole, first = chunk_of(qkv, 0, TIME), chunk_of(qkv, 0, cut)
    second = chunk_of(qkv, cut, TIME, first.memory_after())
    read = [chunk.read() * chunk.decay.correction_BHC1 for chunk in (first, second)]
    torch.testing.assert_close(torch.cat(read, 2), whole.read())
    torch.testing.assert_close(second.memory_after(), whole.memory_after())


def test_the_memory_is_what_the_last_query_reads(qkv: list[Tensor]) -> None:
    chunk = chunk_of(qkv, 0, TIME)
    last = qkv[0][:, :, -1:] @ chunk.memory_after()
    torch.testing.assert_close(last, chunk.read()[:, :, -1:])


def test_denominators_follow_their_formulas(qkv: list[Tensor]) -> None:
    """With a chunk size of 5, after 4 tokens; the memory counts over c(5) in place of sqrt(c)."""
    qkv = [7 * x for x in qkv]
    first = chunk_of(qkv, 0, 4)
    second = chunk_of(qkv, 4, TIME, first.memory_after())
    signed, absolute = second.magnitude_of_sum_BHC1(), second.sum_of_magnitudes_BHC1()
    torch.testing.assert_close(signed, second.weights_BHCC.sum(-1, keepdim=True).abs())
    torch.testing.assert_close(absolute, second.weights_BHCC.abs().sum(-1, keepdim=True))
    factors = log_decays(HEADS).double().exp()
    powers = factors[:, None] ** torch.arange(4)
    plain = torch.einsum("ht,bhtk,bhtv->bhkv", powers.flip(1), qkv[1][:, :, :4], qkv[2][:, :, :4])
    whole = (factors[:, None] ** torch.arange(5)).sum(1)[:, None, None]
    largest = (plain / whole).abs().sum(2).amax(-1)[..., None, None]
    assert (largest > 1).all()
    expected = torch.maximum(absolute.clamp_min(1.0), largest)
    torch.testing.assert_close(second.largest_sum_BHC1(5), expected)
    torch.testing.assert_close(
        first.largest_sum_BHC1(5), first.sum_of_magnitudes_BHC1().clamp_min(1.0)
    )
