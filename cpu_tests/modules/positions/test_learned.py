from __future__ import annotations

import torch

from scalerun.modules.init import initialize, normal
from scalerun.modules.positions.learned import LearnedPositions


def test_position_0_is_row_2_and_every_position_has_a_row() -> None:
    positions = LearnedPositions(5, 4, init=normal(1.0))
    initialize(positions, 0)
    assert positions.weight.shape == (7, 4)
    assert positions.limit == 5
    assert torch.equal(positions(torch.tensor([[0, 4]])), positions.weight[[2, 6]][None])
