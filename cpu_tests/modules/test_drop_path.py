from __future__ import annotations

import pytest
import torch

from scalerun.modules.drop_path import drop_path, drop_path_rate_of_layer, dropout


@pytest.mark.parametrize("function", [dropout, drop_path])
def test_nothing_is_copied_at_rate_0_or_in_evaluation(function: object) -> None:
    assert callable(function)
    x = torch.randn(3, 4)
    assert function(x, 0.0, training=True) is x
    assert function(x, 0.5, training=False) is x


def test_drop_path_keeps_or_drops_whole_samples_and_the_mean() -> None:
    dropped = drop_path(torch.ones(20000, 2, 3), 0.25, training=True)
    per_sample = dropped.flatten(1)
    assert torch.equal(per_sample.amin(1), per_sample.amax(1))
    assert per_sample.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert per_sample.mean().item() == pytest.approx(1.0, abs=0.02)


def test_dropout_drops_elements_and_keeps_the_mean() -> None:
    dropped = dropout(torch.ones(50000), 0.25, training=True)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.02)


def test_rates_grow_linearly_with_depth() -> None:
    assert [drop_path_rate_of_layer(0.3, layer=i, num_layers=4) for i in range(4)] == pytest.approx(
        [0, 0.1, 0.2, 0.3]
    )
    assert drop_path_rate_of_layer(0.3, layer=0, num_layers=1) == 0.0
