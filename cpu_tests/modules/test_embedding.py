from __future__ import annotations

import torch
from torch import Tensor

from scalerun.modules.embedding import InputEmbedding, TokenEmbedding
from scalerun.modules.init import initialize, normal
from scalerun.modules.norm import LayerNorm
from scalerun.modules.positions.learned import LearnedPositions

TOKENS = torch.tensor([[4, 1, 0], [2, 2, 3]])
POSITIONS = torch.arange(3)[None]


def table() -> TokenEmbedding:
    return TokenEmbedding(5, 4, padding_idx=1, init=normal(1.0, zero_row=1))


def test_the_padding_row_starts_at_0_and_gets_no_gradient() -> None:
    embedding = table()
    initialize(embedding, 0)
    assert embedding.weight[1].tolist() == [0.0] * 4
    embedding(TOKENS).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad[:, 0].tolist() == [1.0, 0.0, 2.0, 1.0, 1.0]


def test_scaled_token_plus_position_is_normed() -> None:
    embedding = InputEmbedding(
        table(), LearnedPositions(3, 4, init=normal(1.0)), norm=LayerNorm(4), scale=3.0
    )
    initialize(embedding, 0)
    assert isinstance(embedding.positions, LearnedPositions)
    summed: Tensor = 3.0 * embedding.tokens.weight[TOKENS] + embedding.positions.weight[2:5]
    expected = torch.nn.functional.layer_norm(summed, (4,))
    torch.testing.assert_close(embedding(TOKENS, POSITIONS), expected)
    assert embedding.num_positions() == 3


def test_positions_are_optional() -> None:
    embedding = InputEmbedding(table(), None)
    initialize(embedding, 0)
    assert torch.equal(embedding(TOKENS, POSITIONS), embedding.tokens.weight[TOKENS])
    assert embedding.num_positions() is None
