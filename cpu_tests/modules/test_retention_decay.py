from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scalerun.modules.retention_decay import (
    Decay,
    angles,
    log_decays,
    retention_tables,
    table_dtype,
)


def decay_of(positions: list[int], *, heads: int = 3, padding: list[bool] | None = None) -> Decay:
    log_H1 = log_decays(heads).double()[:, None]
    mask = None if padding is None else torch.tensor([padding])
    return Decay(log_H1, torch.tensor([positions]), mask)


def root(factor: float, tokens: int) -> float:
    """Of the sum of powers; 1 without a token."""
    return sum(factor**j for j in range(tokens)) ** 0.5 or 1.0


def test_decays_are_those_of_the_paper() -> None:
    factors = [1 - 2.0 ** (-5 - h) for h in range(8)]
    expected = torch.tensor(factors, dtype=torch.float64).log()
    torch.testing.assert_close(log_decays(8).double(), expected, rtol=1e-6, atol=0)


def test_angles_run_from_one_to_a_ten_thousandth() -> None:
    expected = torch.tensor([1.0, 10000 ** (-1 / 3), 10000 ** (-2 / 3), 1e-4])
    torch.testing.assert_close(angles(8), expected)
    assert angles(2).tolist() == [1.0]


def test_heads_beyond_float32_forget_nothing_and_stay_finite() -> None:
    assert log_decays(32)[20:].tolist() == [0.0] * 12
    decay = decay_of([3, 4, 5], heads=32)
    into = decay.into_memory_BHC1[0, 31, :, 0]
    torch.testing.assert_close(into, torch.full((3,), 6.0**-0.5).double())
    for table in (
        decay.within_BHCC(),
        decay.from_memory_BHC1,
        decay.of_memory_BH11,
        decay.correction_BHC1,
    ):
        assert table.isfinite().all()


def test_long_chunks_have_finite_tables() -> None:
    """Powers of the distance to a later token would overflow."""
    within = Decay(log_decays(1)[:, None], torch.arange(4000)[None], None).within_BHCC()
    assert within.isfinite().all()
    assert not within.triu(1).any()


@pytest.mark.parametrize("begin", [0, 1, 40])
def test_tables_are_powers_over_roots_of_sums(begin: int) -> None:
    count = 4
    decay = decay_of(list(range(begin, begin + count)))
    within = decay.within_BHCC()
    for h, factor in enumerate(log_decays(3).double().exp().tolist()):
        before, after = root(factor, begin), root(factor, begin + count)
        assert float(decay.root_before_BH1[0, h, 0]) == pytest.approx(before)
        kept = factor**count * before / after
        assert float(decay.of_memory_BH11[0, h]) == pytest.approx(kept)
        for i in range(count):
            own, total = root(factor, i + 1), root(factor, begin + i + 1)
            ahead = factor ** (i + 1) * before / own
            assert float(decay.from_memory_BHC1[0, h, i]) == pytest.approx(ahead)
            into = factor ** (count - 1 - i) / after
            assert float(decay.into_memory_BHC1[0, h, i]) == pytest.approx(into)
            assert float(decay.correction_BHC1[0, h, i]) == pytest.approx(own / total)
            for j in range(count):
                expected = factor ** (i - j) / own if j <= i else 0.0
                assert float(within[0, h, i, j]) == pytest.approx(expected)


def test_padding_passes_no_time() -> None:
    """Five real tokens came; then padding, two real tokens, padding; two are within."""
    decay = decay_of([4, 5, 6, 6], padding=[True, False, False, True])
    plain = decay_of([5, 6])
    torch.testing.assert_close(decay.of_memory_BH11, plain.of_memory_BH11)
    for name in ("from_memory_BHC1", "into_memory_BHC1", "correction_BHC1"):
        torch.testing.assert_close(getattr(decay, name)[:, :, 1:3], getattr(plain, name))
    torch.testing.assert_close(decay.within_BHCC()[..., 1:3, 1:3], plain.within_BHCC())


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("size", "lengths"), [(None, [7]), (3, [3, 3, 1]), (7, [7]), (9, [7])])
def test_each_chunk_has_tables_of_its_own(
    size: int | None, lengths: list[int], padded: bool
) -> None:
    positions = torch.arange(7)[None]
    mask = torch.zeros(1, 7, dtype=torch.bool) if padded else None
    tables = retention_tables(
        positions, mask, num_heads=2, head_dim=4, chunk_size=size, dtype=torch.float64
    )
    assert [within.shape[-1] for within in tables.within_BHCC] == lengths
    for chunk, within in zip(tables.chunks, tables.within_BHCC, strict=True):
        torch.testing.assert_close(chunk.within_BHCC(), within)


def test_keys_are_rotated_and_scaled() -> None:
    tables = retention_tables(
        torch.tensor([[5]]), None, num_heads=1, head_dim=4, chunk_size=None, dtype=torch.float32
    )
    x = torch.tensor([1.0, 0.0, 0.0, 2.0])[None, None, None]
    q, k = tables(x, x)
    slow, fast = torch.tensor(5e-4), torch.tensor(5.0)
    expected = [fast.cos(), fast.sin(), -2 * slow.sin(), 2 * slow.cos()]
    torch.testing.assert_close(q.flatten(), torch.stack(expected))
    torch.testing.assert_close(k, q / 2)


def test_tables_are_float32_unless_the_model_is_wider() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert table_dtype(dtype) == torch.float32
    assert table_dtype(torch.float64) == torch.float64

    def tables_of(dtype: torch.dtype) -> tuple[Tensor, Decay, Tensor]:
        tables = retention_tables(
            torch.tensor([[5]]), None, num_heads=1, head_dim=4, chunk_size=None, dtype=dtype
        )
        return tables.queries, tables.chunks[0], tables.within_BHCC[0]

    angle, decay, within = tables_of(torch.bfloat16)
    assert (angle.dtype, decay.dtype, within.dtype) == (
        torch.float32,
        torch.float32,
        torch.bfloat16,
    )
