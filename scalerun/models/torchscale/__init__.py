"""TorchScale's configurations and weights, for scalerun's models."""

from scalerun.models.torchscale.beit3 import load_beit3
from scalerun.models.torchscale.build import Decoder, Encoder, EncoderDecoder
from scalerun.models.torchscale.configs import (
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
)
from scalerun.models.torchscale.loader import (
    load_decoder,
    load_encoder,
    load_encoder_decoder,
    load_mlm,
)
from scalerun.models.torchscale.retnet import RetNet, RetNetConfig, load_retnet

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Encoder",
    "EncoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "RetNet",
    "RetNetConfig",
    "load_beit3",
    "load_decoder",
    "load_encoder",
    "load_encoder_decoder",
    "load_mlm",
    "load_retnet",
]
