"""The masked language model, and its presets.

B batch, T tokens, N selected tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch.nn.functional as F
from torch import Tensor, nn

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.distributed.mesh import ONE_RANK, ModelMeshes
from scalerun.distributed.sharding import empty_parameter, part_of
from scalerun.models.base_model import register_model, register_model_architecture
from scalerun.models.blocks import TransformerParts
from scalerun.models.transformer_encoder import TransformerEncoder, TransformerEncoderConfig
from scalerun.modules.activations import ACTIVATIONS, Activation
from scalerun.modules.init import Initializer, LinearInit, zeros
from scalerun.modules.linear import Linear
from scalerun.modules.megatron.mappings import copy_to
from scalerun.modules.norm import LayerNorm

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

MODEL = "transformer_mlm"
HEAD_EPS = 1e-5


@dataclass
class TransformerMLMConfig(TransformerEncoderConfig):
    """Settings of an encoder whose output layer is BERT's head on the token embedding."""

    share_encoder_input_output_embed: bool = option(
        True, "use the encoder's token embedding as output projection; it has no other"
    )

    def validate(self) -> None:
        super().validate()
        if self.no_output_layer or not self.share_encoder_input_output_embed:
            raise ConfigError(
                "a masked language model projects with its token embedding; remove "
                "--no-output-layer and --no-share-encoder-input-output-embed, or give "
                "--arch transformer_encoder"
            )


class MaskedLMHead(nn.Module):
    """``norm(activation(dense(x))) E^T + bias``, with E the token embedding.

    Source: Devlin et al. 2018, arXiv:1810.04805. The norm's epsilon is 1e-5 whatever the model's.

    Args:
        dim: D.
        vocab_size: V.
        init: how ``dense`` starts.
        activation: applied after it.
        tp_mesh: axis that the vocabulary is spread over, or None. Each rank has the rest whole.
    """

    def __init__(
        self,
        dim: int,
        vocab_size: int,
        *,
        init: LinearInit,
        activation: Activation,
        tp_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.tp_mesh = tp_mesh
        self.dense = Linear(dim, dim, init=init)
        self.activation = activation
        self.norm = LayerNorm(dim, HEAD_EPS)
        self.bias = empty_parameter((vocab_size,), mesh=tp_mesh)

    def initializers(self) -> dict[str, Initializer]:
        return {"bias": zeros}

    def forward(self, x: Tensor, embedding_VD: Tensor) -> Tensor:
        """(..., V) from (..., D), or this rank's part of V."""
        x = self.norm(self.activation(self.dense(x)))
        x = copy_to(x, self.tp_mesh)
        weight_VD, bias_V = (part_of(p, self.tp_mesh) for p in (embedding_VD, self.bias))
        return F.linear(x, weight_VD, bias_V.to(x.dtype))


@register_model(MODEL, TransformerMLMConfig)
class TransformerMLM(TransformerEncoder):
    """An encoder that predicts tokens which were hidden from it."""

    def __init__(self, parts: TransformerParts) -> None:
        super().__init__(parts)
        self.head = MaskedLMHead(
            parts.stack.dim,
            parts.vocab_size,
            init=parts.weights.output,
            activation=ACTIVATIONS[parts.cfg.activation_fn],
            tp_mesh=self.embedding.tokens.tp_mesh,
        )

    @classmethod
    def build_model(
        cls,
        cfg: ScalerunDataclass,
        *,
        vocab_size: int,
        padding_idx: int | None,
        meshes: ModelMeshes = ONE_RANK,
    ) -> Self:
        assert isinstance(cfg, TransformerMLMConfig)
        return cls(
            cls.parts_class(
                cfg,
                cfg.encoder_stack(),
                vocab_size=vocab_size,
                padding_idx=padding_idx,
                meshes=meshes,
            )
        )

    def logits(self, x_BTD: Tensor) -> Tensor:
        return self.head(x_BTD, self.embedding.tokens.weight)

    def head_flops(self) -> int:
        """Operations of forward and backward of the head for one token."""
        return 6 * (self.head.dense.weight.numel() + self.embedding.tokens.weight.numel())

    def training_flops_per_token(self, sequence_length: int) -> int:
        return self.flops_per_token(sequence_length) + self.head_flops()


@register_model_architecture(MODEL, "mlm_base")
def mlm_base() -> TransformerMLMConfig:
    """The base encoder of TorchScale's masked-language-modelling example."""
    return TransformerMLMConfig(
        encoder_normalize_before=False,
        dropout=0.1,
        layernorm_embedding=True,
        encoder_learned_pos=True,
        max_source_positions=512,
    )


@register_model_architecture(MODEL, "bert_base")
def bert_base() -> TransformerMLMConfig:
    """``mlm_base`` as TorchScale's documented command trains it: DeepNorm, a bias by distance.

    The bias comes on top of the learned positions.
    """
    return mlm_base().replace(
        encoder_normalize_before=None, deepnorm=True, rel_pos_buckets=32, max_rel_pos=128
    )


@register_model_architecture(MODEL, "mlm_tiny")
def mlm_tiny() -> TransformerMLMConfig:
    """The size of ``lm_tiny``."""
    return TransformerMLMConfig(
        encoder_embed_dim=128,
        encoder_attention_heads=4,
        encoder_ffn_embed_dim=512,
        encoder_layers=4,
        rotary=True,
    )
