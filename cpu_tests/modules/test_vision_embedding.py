from __future__ import annotations

import pytest
import torch

from scalerun.modules.init import initialize
from scalerun.modules.vision_embedding import VisionEmbedding


@pytest.fixture
def embedding() -> VisionEmbedding:
    layer = VisionEmbedding(6, 3, 2, 5, mask_token=True, cls_token=True)
    initialize(layer, 1)
    assert layer.mask_token is not None
    assert layer.cls_token is not None
    with torch.no_grad():
        layer.mask_token += 7.0
        layer.cls_token += 9.0
    return layer


def test_patches_are_projected_row_by_row(embedding: VisionEmbedding) -> None:
    image = torch.randn(1, 2, 6, 6)
    tokens = embedding(image)
    assert tokens.shape == (1, embedding.num_tokens, 5)
    weight = embedding.weight.flatten(1)
    for index, (row, column) in enumerate([(0, 0), (0, 3), (3, 0), (3, 3)]):
        patch = image[0, :, row : row + 3, column : column + 3].flatten()
        torch.testing.assert_close(tokens[0, 1 + index], weight @ patch + embedding.bias)
    assert (tokens[:, 0] == 9.0).all()


def test_masked_patches_become_the_mask_token(embedding: VisionEmbedding) -> None:
    masked = torch.tensor([[False, True, False, False]])
    tokens = embedding(torch.randn(1, 2, 6, 6), masked)
    assert (tokens[0, 2] == 7.0).all()
    assert (tokens[0, 1] != 7.0).any()


def test_another_size_is_refused(embedding: VisionEmbedding) -> None:
    with pytest.raises(ValueError, match=r"\(2, 6, 6\)"):
        embedding(torch.randn(1, 2, 6, 9))
    with pytest.raises(ValueError, match="not a multiple"):
        VisionEmbedding(7, 3, 2, 5)
    with pytest.raises(ValueError, match="no mask token"):
        VisionEmbedding(6, 3, 2, 5)(torch.randn(1, 2, 6, 6), torch.zeros(1, 4, dtype=torch.bool))
