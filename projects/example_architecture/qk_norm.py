"""QK-Norm: a decoder whose attention norms each head's queries and keys.

Source: Henry et al. 2020, arXiv:2010.04245, in the form of Dehghani et al. 2023, arXiv:2302.05442:
a norm with learned gains over the width of a head, shared by the heads, ahead of the scores. The
scores then do not grow with the projections' weights, so that larger learning rates stay stable.
Ours is RMSNorm where theirs is LayerNorm. It stands before the rotation of rotary positions, which
keeps lengths.

B batch, T new tokens, H heads, K width of a head, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.models.base_model import register_model, register_model_architecture
from scalerun.models.blocks import TransformerParts
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_lm import TransformerLM
from scalerun.modules.attention import Attention, AttentionInit
from scalerun.modules.block_context import BlockContext
from scalerun.modules.mixer import Mixer
from scalerun.modules.norm import RMSNorm

MODEL = "qk_norm_lm"


@dataclass
class QKNormConfig(TransformerConfig):
    """The settings of a transformer decoder and one of our own: its flag is ``--qk-norm-eps``."""

    qk_norm_eps: float = option(1e-6, "added to the mean square in the norms of queries and keys")

    def validate(self) -> None:
        super().validate()
        if not 0.0 < self.qk_norm_eps < 1.0:
            raise ConfigError(
                f"--qk-norm-eps is {self.qk_norm_eps:g}; give a number above 0, below 1"
            )


class QKNormAttention(Attention):
    """Attention whose queries and keys have length ``sqrt(K)``, times learned gains.

    The cache of decoding, masks, dropout and rotations are those of :class:`Attention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        init: AttentionInit,
        eps: float,
        dropout: float = 0.0,
        inner_norm: nn.Module | None = None,
    ) -> None:
        super().__init__(dim, num_heads, init=init, dropout=dropout, inner_norm=inner_norm)
        self.q_norm = RMSNorm(dim // num_heads, eps)
        self.k_norm = RMSNorm(dim // num_heads, eps)

    def project(self, x_BTD: Tensor, context: BlockContext) -> tuple[Tensor, Tensor, Tensor]:
        q_BHTK, k_BHTK, v_BHTK = super().project(x_BTD, context)
        # Under autocast the gains are wider than the projections; attention wants one type.
        q_BHTK, k_BHTK = self.q_norm(q_BHTK).to(q_BHTK), self.k_norm(k_BHTK).to(k_BHTK)
        return q_BHTK, k_BHTK, v_BHTK


class QKNormParts(TransformerParts):
    """All parts of the plain decoder but one."""

    cfg: QKNormConfig

    def mixer(self, layer: int) -> Mixer:
        return QKNormAttention(
            self.stack.dim,
            self.stack.num_heads,
            init=self.weights.attention,
            eps=self.cfg.qk_norm_eps,
            dropout=self.cfg.attention_dropout,
            inner_norm=self.norm(self.stack.dim) if self.axes.inner_norm else None,
        )


@register_model(MODEL, QKNormConfig)
class QKNormLM(TransformerLM):
    """``--arch qk_norm_lm``, with the defaults of :class:`QKNormConfig`."""

    parts_class = QKNormParts


@register_model_architecture(MODEL, "qk_norm_tiny")
def qk_norm_tiny() -> QKNormConfig:
    """The size of ``lm_tiny``."""
    return QKNormConfig(
        decoder_embed_dim=128,
        decoder_attention_heads=4,
        decoder_ffn_embed_dim=512,
        decoder_layers=4,
        share_decoder_input_output_embed=True,
        rotary=True,
    )
