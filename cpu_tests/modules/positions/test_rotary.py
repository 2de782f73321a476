from __future__ import annotations

import math

import pytest
import torch

from scalerun.modules.positions.base_position import turn
from scalerun.modules.positions.rotary import Rotary


def test_pairs_turn_by_the_papers_angles() -> None:
    x = torch.randn(1, 1, 3, 6, dtype=torch.float64)
    rotation = Rotary(6).rotation(torch.tensor([[0, 1, 40]]), center=0)
    q, k = rotation(x, x)
    torch.testing.assert_close(q, k)
    for t, position in enumerate((0, 1, 40)):
        for i in range(3):
            angle = position * 10000 ** (-2 * i / 6)
            even, odd = x[0, 0, t, 2 * i].item(), x[0, 0, t, 2 * i + 1].item()
            expected = (
                even * math.cos(angle) - odd * math.sin(angle),
                odd * math.cos(angle) + even * math.sin(angle),
            )
            assert q[0, 0, t, 2 * i : 2 * i + 2].tolist() == pytest.approx(expected, abs=1e-5)


def test_products_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    rotary = Rotary(8)
    products = []
    for query, key in ((7, 3), (104, 100)):
        turned_q, _ = rotary.rotation(torch.tensor([[query]]), center=0)(q, k)
        _, turned_k = rotary.rotation(torch.tensor([[key]]), center=0)(q, k)
        products.append((turned_q * turned_k).sum().item())
    assert products[0] == pytest.approx(products[1], abs=1e-4)


def test_tables_stay_float32_in_a_half_precision_model() -> None:
    table = Rotary(8).bfloat16().rotation(torch.tensor([[4095]]), center=0).queries
    assert table.dtype == torch.float32
    assert table[0, 0, 0, 0, 0].item() == pytest.approx(math.cos(4095), abs=1e-4)


def test_compiled_and_eager_turns_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 4, 8).bfloat16()
    table = Rotary(8).rotation(torch.arange(4)[None], center=0).queries
    eager = turn(x, table)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(turn(x, table), eager)
    assert eager.dtype == torch.bfloat16


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="even width of a head, not 7"):
        Rotary(7)
