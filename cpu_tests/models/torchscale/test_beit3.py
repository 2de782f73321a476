from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.torchscale.beit3 import load_beit3
from scalerun.models.torchscale.loader import load_encoder

StateMaker = Callable[..., dict[str, Tensor]]
SIDE, PATCH, CHANNELS, DIM = 2, 3, 2, 32
ROWS = SIDE**2 + 3
"""Positions of the patches and the class token, after two rows that no token uses."""


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def beit3_state(golden_state: StateMaker) -> dict[str, Tensor]:
    state = golden_state(side="encoder", prefix="beit3.encoder.", halves=(".A", ".B"), output=False)
    del state["beit3.encoder.embed_tokens.weight"]
    for half in "AB":
        state[f"beit3.encoder.embed_positions.{half}.weight"] = randn(ROWS, DIM)
    return state | {
        "beit3.text_embed.weight": randn(23, DIM),
        "beit3.vision_embed.cls_token": randn(1, 1, DIM),
        "beit3.vision_embed.mask_token": randn(1, 1, DIM) + 1,
        "beit3.vision_embed.proj.weight": randn(DIM, CHANNELS, PATCH, PATCH),
        "beit3.vision_embed.proj.bias": randn(DIM),
    }


def patches(state: dict[str, Tensor], images: Tensor, masked: Tensor) -> Tensor:
    """Class token and projected patches, written out."""
    weight, bias = (state[f"beit3.vision_embed.proj.{name}"] for name in ("weight", "bias"))
    rows = []
    for row in range(SIDE):
        for column in range(SIDE):
            size = PATCH
            patch = images[:, :, row * size :, column * size :][:, :, :size, :size]
            rows.append(patch.flatten(1) @ weight.flatten(1).T + bias)
    found = torch.stack(rows, dim=1)
    found[masked] = state["beit3.vision_embed.mask_token"].flatten()
    first = state["beit3.vision_embed.cls_token"].expand(len(images), 1, DIM)
    return torch.cat((first, found), dim=1)


@torch.no_grad()
@pytest.mark.parametrize("prefix", ["beit3.", ""])
def test_it_is_a_multiway_encoder_of_patches_and_words(
    beit3_state: dict[str, Tensor], encoder_sizes: dict[str, int], prefix: str
) -> None:
    fields = encoder_sizes | {"multiway": True}
    state = {prefix + key.removeprefix("beit3."): tensor for key, tensor in beit3_state.items()}
    model = load_beit3(fields, state, version="main").eval()
    images = randn(2, CHANNELS, SIDE * PATCH, SIDE * PATCH)
    masked = torch.tensor([[True, False, False, True], [False, False, True, False]])
    tokens = torch.tensor([[3, 4, 5], [6, 7, 0]])
    padding = torch.tensor([[False, False, False], [False, False, True]])
    found = model.encode(
        tokens, images_BCHW=images, masked_BP=masked, padding_mask_BT=padding
    ).features

    own = {k.removeprefix("beit3.encoder."): t for k, t in beit3_state.items() if "encoder" in k}
    own["embed_tokens.weight"] = beit3_state["beit3.text_embed.weight"]
    encoder = load_encoder(fields, own, version="main").eval()
    vectors = torch.cat(
        (patches(beit3_state, images, masked), own["embed_tokens.weight"][tokens]), 1
    )
    hidden = torch.cat((torch.zeros(2, 5, dtype=torch.bool), padding), dim=1)
    expected = encoder(token_embeddings_BTD=vectors, padding_mask_BT=hidden, split=5).features
    torch.testing.assert_close(found[~hidden], expected[~hidden], rtol=1e-5, atol=1e-5)


def test_the_sizes_of_images_are_those_of_the_weights(
    beit3_state: dict[str, Tensor], encoder_sizes: dict[str, int]
) -> None:
    model = load_beit3(encoder_sizes | {"multiway": True}, beit3_state, version="main")
    vision = model.vision_embedding
    assert (vision.image_size, vision.patch_size, vision.channels) == (
        SIDE * PATCH,
        PATCH,
        CHANNELS,
    )
    assert model.max_positions() == ROWS - 2


def test_keys_have_to_be_those_of_beit3(
    beit3_state: dict[str, Tensor], encoder_sizes: dict[str, int]
) -> None:
    fields = encoder_sizes | {"multiway": True}
    for key in ("beit3.vision_embed.mask_token", "beit3.encoder.embed_positions.B.weight"):
        rest = {name: tensor for name, tensor in beit3_state.items() if name != key}
        with pytest.raises(UserError, match=re.escape(key.removeprefix("beit3."))):
            load_beit3(fields, rest, version="main")
    with pytest.raises(UserError, match=r"has head\.weight"):
        load_beit3(fields, beit3_state | {"head.weight": randn(2)}, version="main")
    odd = beit3_state | {"beit3.encoder.embed_positions.A.weight": randn(ROWS + 1, DIM)}
    with pytest.raises(UserError, match="is no square image"):
        load_beit3(fields, odd, version="main")
