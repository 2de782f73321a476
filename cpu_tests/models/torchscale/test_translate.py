from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scalerun.dataclass.errors import ConfigError
from scalerun.models.torchscale.configs import DecoderConfig, EncoderConfig
from scalerun.models.torchscale.loader import load_decoder, load_encoder
from scalerun.models.torchscale.translate import decoder_config, encoder_config

StateMaker = Callable[..., dict[str, Tensor]]
SEGMENTS = {"segment_length": "[4,8]", "dilated_ratio": "[1,2]"}
DECODERS: dict[str, tuple[dict[str, Any], list[float], float, float]] = {
    "two_branches": (
        SEGMENTS,
        [2.916552, 1.422939, 0.161219, 0.841686, 0.876800, 1.218716],
        -10.14013,
        472.4056,
    ),
    "three_branches_xpos": (
        {"segment_length": [4, 8, 16], "dilated_ratio": [1, 2, 4], "xpos_rel_pos": True},
        [2.916551, 1.422940, 0.161219, 1.363697, 0.684507, 0.906411],
        -4.35140,
        474.2890,
    ),
}


def wide(side: str, sizes: dict[str, int]) -> dict[str, int]:
    """The sizes of TorchScale's recorded LongNets."""
    return sizes | {f"{side}_embed_dim": 48, f"{side}_attention_heads": 6}


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_longnet_decoders_give_torchscales_logits(
    name: str,
    golden_state: StateMaker,
    golden_tokens: Tensor,
    decoder_sizes: dict[str, int],
    check_golden: Callable[..., None],
) -> None:
    fields, *recorded = DECODERS[name]
    given = wide("decoder", decoder_sizes) | {"flash_attention": True, **fields}
    state = golden_state(side="decoder", dim=48, heads=6)
    model = load_decoder(given, state, version="main").eval()
    check_golden(model(golden_tokens).logits, *recorded)


@torch.no_grad()
def test_longnet_encoders_count_the_zeros_that_torchscale_counts(
    golden_state: StateMaker,
    golden_tokens: Tensor,
    encoder_sizes: dict[str, int],
    check_golden: Callable[..., None],
) -> None:
    given = wide("encoder", encoder_sizes) | SEGMENTS
    state = golden_state(side="encoder", dim=48, heads=6)
    model = load_encoder(given, state, version="main").eval()
    ends = [2.895916, 0.511560, -0.309015, 0.427736, 0.979157, 1.351369]
    check_golden(model(golden_tokens).logits, ends, -14.19413, 467.1363)


def test_a_new_encoder_does_not_count_them() -> None:
    given = EncoderConfig(**SEGMENTS)
    assert encoder_config(given, version="main").encoder_zero_keys
    assert not encoder_config(given, version="0.3.0").encoder_zero_keys
    assert not encoder_config(EncoderConfig(), version="main").encoder_zero_keys


def test_lists_may_be_text() -> None:
    cfg = decoder_config(DecoderConfig(**SEGMENTS), version="main")
    assert (cfg.segment_length, cfg.dilated_ratio) == ([4, 8], [1, 2])
    assert decoder_config(DecoderConfig(segment_length=""), version="main").segment_length == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"segment_length": "[4,8]"}, "need each other"),
        ({"segment_length": "[4]", "dilated_ratio": "range(1)"}, "dilated_ratio is 'range"),
        ({"segment_length": 4, "dilated_ratio": 1}, "segment_length is 4; give a list of whole"),
        ({"segment_length": ["4"], "dilated_ratio": [1]}, "--segment-length: .'4'. is not a list"),
        ({"segment_length": "[6]", "dilated_ratio": "[4]"}, "has 6, which is not a multiple"),
    ],
)
def test_segments_that_make_no_sense_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decoder_config(DecoderConfig(**fields), version="main")


def test_the_version_without_longnet_has_no_segments(decoder_sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"0\.3\.0 has no segment_length"):
        load_decoder(decoder_sizes | SEGMENTS, {}, version="0.3.0")
