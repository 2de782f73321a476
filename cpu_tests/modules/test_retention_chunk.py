from __future__ import annotations

import pytest
import torch

from scalerun.modules.retention_chunk import Counts, Decay, float_dtype, log_decays


def decay_of(num_heads: int, begin: int, count: int) -> Decay:
    """Tables of a chunk after ``begin`` tokens, without padding."""
    positions = torch.arange(begin, begin + count)[None]
    return Decay(num_heads, Counts.of(positions, None), torch.float64)


def test_decays_are_those_of_the_paper() -> None:
    factors = [1 - 2.0 ** (-5 - h) for h in range(8)]
    expected = torch.tensor(factors, dtype=torch.float64).log()
    torch.testing.assert_close(log_decays(8).double(), expected, rtol=1e-6, atol=0)


def test_heads_beyond_float32_forget_nothing_and_stay_finite() -> None:
    assert log_decays(32)[20:].tolist() == [0.0] * 12
    decay = decay_of(32, 3, 5)
    torch.testing.assert_close(decay.root_all_BHC()[0, 31], torch.arange(4.0, 9.0).double().sqrt())
    for table in (
        decay.within_BHCC(),
        decay.from_memory_BHC(),
        decay.into_memory_BHC(),
        decay.of_memory_BH1(),
    ):
        assert table.isfinite().all()


def test_long_chunks_have_finite_tables() -> None:
    """Powers of the distance to a later token would overflow."""
    within = Decay(1, Counts.of(torch.arange(4000)[None], None), torch.float32).within_BHCC()
    assert within.isfinite().all()
    assert not within.triu(1).any()


@pytest.mark.parametrize("begin", [0, 1, 40])
def test_tables_are_powers_over_roots_of_sums(begin: int) -> None:
    heads, count = 3, 4
    decay = decay_of(heads, begin, count)
    for h in range(heads):
        factor = float(log_decays(heads).double().exp()[h])

        def root(tokens: int, factor: float = factor) -> float:
            return sum(factor**j for j in range(tokens)) ** 0.5

        end = begin + count
        for i in range(count):
            own, total = root(i + 1), root(begin + i + 1)
            assert float(decay.root_here_BHC()[0, h, i]) == pytest.approx(own)
            assert float(decay.root_all_BHC()[0, h, i]) == pytest.approx(total)
            into = factor ** (count - 1 - i) / root(end)
            assert float(decay.into_memory_BHC()[0, h, i]) == pytest.approx(into)
            out_of = factor ** (i + 1) * (root(begin) or 1.0) / own
            assert float(decay.from_memory_BHC()[0, h, i]) == pytest.approx(out_of)
            for j in range(count):
                within = factor ** (i - j) / own if j <= i else 0.0
                assert float(decay.within_BHCC()[0, h, i, j]) == pytest.approx(within)
        kept = factor**count * (root(begin) or 1.0) / root(end)
        assert float(decay.of_memory_BH1()[0, h, 0]) == pytest.approx(kept)


def test_a_part_of_the_tokens_is_counted_as_a_chunk_of_its_own() -> None:
    padding = torch.tensor([[False, True, False, False, True], [True, True, False, True, False]])
    positions = torch.tensor([[0, 0, 1, 2, 2], [0, 0, 0, 0, 1]])
    part = Counts.of(positions, padding).part(1, 4)
    assert part.with_padding
    assert part.here_BC.tolist() == [[0, 1, 2], [0, 1, 1]]
    assert part.all_BC.tolist() == [[1, 2, 3], [1, 1, 1]]


def test_tables_are_float32_unless_the_model_is_wider() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert float_dtype(dtype) == torch.float32
    assert float_dtype(torch.float64) == torch.float64
