from __future__ import annotations

import pytest
import torch
from torch import nn

from scalerun.modules.block_context import BlockContext
from scalerun.modules.residual import (
    DeepNorm,
    PostNorm,
    PreNorm,
    Residual,
    deepnorm_alpha,
    deepnorm_gain,
    subln_gain,
)


class Halve(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


@pytest.mark.parametrize(
    ("kind", "seen", "result"),
    [(PreNorm, 2.0, 3 * 4.0 + 1.0), (PostNorm, 4.0, 6.5), (DeepNorm, 4.0, 6.5)],
)
def test_the_factor_is_on_the_stream_and_the_norm_in_its_place(
    kind: type[Residual], seen: float, result: float
) -> None:
    residual = kind(Halve(), alpha=3.0)
    x, y = torch.tensor([[[4.0]]]), torch.tensor([[[1.0]]])
    assert residual.before(x, BlockContext()).item() == seen
    assert residual.after(x, y, BlockContext()).item() == result


def test_only_the_branch_is_dropped() -> None:
    residual = PreNorm(Halve(), dropout=0.5, drop_path=0.5)
    x, y = torch.full((64, 8, 4), 10.0), torch.ones(64, 8, 4)
    values = set(residual.after(x, y, BlockContext()).unique().tolist())
    assert values == {10.0, 14.0}
    residual.eval()
    assert torch.equal(residual.after(x, y, BlockContext()), x + y)


def test_factors_and_gains_have_the_papers_values() -> None:
    assert [deepnorm_alpha(n) for n in (6, 12, 24)] == pytest.approx(
        [1.861210, 2.213364, 2.632148], abs=1e-6
    )
    assert [deepnorm_gain(n) for n in (6, 12, 24)] == pytest.approx(
        [0.379918, 0.319472, 0.268642], abs=1e-6
    )
    assert [subln_gain(n) for n in (1, 6, 12, 24)] == pytest.approx(
        [0.832555, 1.576359, 1.782710, 1.967537], abs=1e-6
    )
