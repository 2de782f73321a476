"""TorchScale's configurations and weights, for scalerun's models."""

from scalerun.models.torchscale.build import Decoder, Encoder, EncoderDecoder
from scalerun.models.torchscale.configs import (
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
)
from scalerun.models.torchscale.loader import load_decoder, load_encoder, load_encoder_decoder
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
    "load_decoder",
    "load_encoder",
    "load_encoder_decoder",
    "load_retnet",
]
