"""Models: what can be trained, and the presets by which they are chosen."""

from scalerun.models import (
    beit3,
    deepnet,
    longnet,
    retnet,
    transformer_encoder,
    transformer_lm,
    transformer_mlm,
    transformer_mt,
    xmoe,
)
from scalerun.models.base_decoder import BaseDecoder, DecoderOutput
from scalerun.models.base_model import (
    ARCH_REGISTRY,
    MODEL_REGISTRY,
    BaseModel,
    build_model,
    register_model,
    register_model_architecture,
)

__all__ = [
    "ARCH_REGISTRY",
    "MODEL_REGISTRY",
    "BaseDecoder",
    "BaseModel",
    "DecoderOutput",
    "beit3",
    "build_model",
    "deepnet",
    "longnet",
    "register_model",
    "register_model_architecture",
    "retnet",
    "transformer_encoder",
    "transformer_lm",
    "transformer_mlm",
    "transformer_mt",
    "xmoe",
]
