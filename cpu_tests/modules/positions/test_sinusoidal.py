from __future__ import annotations

import math

import pytest
import torch

from scalerun.modules.positions.sinusoidal import SinusoidalPositions


def test_rows_are_sines_then_cosines_from_row_2() -> None:
    rows = SinusoidalPositions(8)(torch.tensor([[0, 37]]))[0]
    for row, number in zip(rows, (2, 39), strict=True):
        angles = [number * math.exp(-math.log(10000) / 3 * k) for k in range(4)]
        expected = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        assert row.tolist() == pytest.approx(expected, abs=1e-5)


def test_rows_stay_float32_in_a_half_precision_model() -> None:
    rows = SinusoidalPositions(8).bfloat16()(torch.tensor([[4000]]))
    assert rows.dtype == torch.float32
    assert rows[0, 0, 0].item() == pytest.approx(math.sin(4002), abs=1e-4)


@pytest.mark.parametrize("dim", [2, 7])
def test_a_width_that_cannot_be_split_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=f"not {dim}"):
        SinusoidalPositions(dim)
