from __future__ import annotations

import pytest
import torch

from scalerun.dataclass.errors import ConfigError
from scalerun.models.base_model import ARCH_REGISTRY, build_model
from scalerun.models.beit3 import BEiT3, BEiT3Config

CONFIG = BEiT3Config(
    encoder_embed_dim=16,
    encoder_attention_heads=2,
    encoder_ffn_embed_dim=24,
    encoder_layers=2,
    max_source_positions=10,
    img_size=8,
    patch_size=4,
    in_chans=1,
)
PATCHES = 4


@pytest.fixture
def model() -> BEiT3:
    built = build_model(
        CONFIG, vocab_size=19, padding_idx=1, seed=1, device=torch.device("cpu")
    ).eval()
    assert isinstance(built, BEiT3)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    return built


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 1, 8, 8)


@torch.no_grad()
def test_an_image_alone_uses_half_a_and_text_alone_half_b(
    model: BEiT3, images: torch.Tensor
) -> None:
    text = torch.randint(2, 19, (2, 5))
    image_before = model.encode(images_BCHW=images).features
    text_before = model.encode(text).features
    for name, parameter in model.named_parameters():
        if ".B." in name:
            parameter += torch.randn(parameter.shape)
    assert torch.equal(model.encode(images_BCHW=images).features, image_before)
    assert not torch.equal(model.encode(text).features, text_before)


@torch.no_grad()
def test_both_are_one_sequence_whose_parts_see_each_other(
    model: BEiT3, images: torch.Tensor
) -> None:
    text = torch.randint(2, 19, (2, 5))
    together = model.encode(text, images_BCHW=images).features
    assert together.shape == (2, 1 + PATCHES + 5, 16)
    other = model.encode(text, images_BCHW=images.flip(2)).features
    assert (together[:, -1] != other[:, -1]).any()


@torch.no_grad()
def test_padding_of_the_text_changes_nothing(model: BEiT3, images: torch.Tensor) -> None:
    text = torch.randint(2, 19, (2, 5))
    alone = model.encode(text, images_BCHW=images).features
    padded = torch.cat((text, torch.ones(2, 3, dtype=torch.long)), dim=1)
    found = model.encode(padded, images_BCHW=images, padding_mask_BT=padded == 1).features
    torch.testing.assert_close(found[:, : 1 + PATCHES + 5], alone, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_masked_patch_is_not_seen(model: BEiT3, images: torch.Tensor) -> None:
    masked = torch.zeros(2, PATCHES, dtype=torch.bool)
    masked[:, 1] = True
    before = model.encode(images_BCHW=images, masked_BP=masked).features
    seen = model.encode(images_BCHW=images).features
    images[:, :, :4, 4:] += 1.0
    assert torch.equal(model.encode(images_BCHW=images, masked_BP=masked).features, before)
    assert not torch.equal(model.encode(images_BCHW=images).features, seen)


def test_another_number_of_images_than_texts_is_refused(model: BEiT3) -> None:
    with pytest.raises(ValueError, match="1 images and 2 texts; give a text for each"):
        model.encode(torch.zeros(2, 3, dtype=torch.long), images_BCHW=torch.zeros(1, 3, 8, 8))


def test_nothing_to_encode_is_refused(model: BEiT3) -> None:
    with pytest.raises(ValueError, match="tokens, images, or both"):
        model.encode()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": 3}, "--img-size 8 is not a multiple of --patch-size 3"),
        ({"in_chans": 0}, "--in-chans is 0"),
        ({"multiway": False}, "--no-multiway"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CONFIG.replace(**changes).validate()


@pytest.mark.parametrize(("arch", "dim"), [("beit3_base", 768), ("beit3_large", 1024)])
def test_presets_are_valid(arch: str, dim: int) -> None:
    config = ARCH_REGISTRY.config_for(arch)
    config.validate()
    assert isinstance(config, BEiT3Config)
    assert config.encoder_embed_dim == dim
