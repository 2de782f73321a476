from __future__ import annotations

import pytest
import torch

from scalerun.modules.positions.xpos import XPos, pair_scales

POSITIONS = torch.arange(4)[None]
CENTER = 2  # of four positions


def test_tables_are_the_published_ones() -> None:
    zeta = torch.tensor([0.2857143, 0.4642857, 0.6428571, 0.8214286])
    torch.testing.assert_close(pair_scales(8), zeta)
    scales = XPos(8).scales(POSITIONS, center=CENTER)[0, 0]
    first = torch.tensor([1.0049056, 1.0030016, 1.0017273, 1.0007687])
    last = torch.tensor([0.9975562, 0.9985025, 0.9991374, 0.9996158])
    torch.testing.assert_close(scales[0], first, atol=2e-7, rtol=0)
    torch.testing.assert_close(scales[3], last, atol=2e-7, rtol=0)


def test_turned_rows_are_the_published_ones() -> None:
    x = torch.arange(1.0, 33.0).view(1, 1, 4, 8)
    q, k = XPos(8).rotation(POSITIONS, center=CENTER)(x, x)
    queries = "-28.349483 -22.157524 17.493286 34.676464 28.062860 30.829756 30.891991 32.080528"
    keys = "-28.488552 -22.266220 17.545792 34.780548 28.111332 30.883009 30.915737 32.105190"
    for row, expected in ((q, queries), (k, keys)):
        numbers = torch.tensor([float(word) for word in expected.split()])
        torch.testing.assert_close(row[0, 0, 3], numbers, atol=4e-6, rtol=0)


def test_the_center_cancels() -> None:
    q, k = torch.randn(2, 1, 2, 4, 8, dtype=torch.float64)
    scores = []
    for center in (2, 900):
        turned_q, turned_k = XPos(8).rotation(POSITIONS, center=center)(q, k)
        scores.append(turned_q @ turned_k.transpose(-1, -2))
    torch.testing.assert_close(scores[0], scores[1], atol=1e-5, rtol=1e-5)


def test_a_larger_base_decays_slower() -> None:
    near, far = (XPos(8, base).scales(torch.tensor([[100]]), center=0) for base in (64, 512))
    assert (near < far).all()


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="even width of a head, not 5"):
        XPos(5)
