"""From the five axes of a configuration to parts: the only match on the names of parts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import nn

from scalerun.models import init_schemes
from scalerun.models.init_schemes import ModelInit
from scalerun.models.transformer_config import Axes, TransformerConfig
from scalerun.modules.attention import Attention
from scalerun.modules.block import TransformerBlock
from scalerun.modules.drop_path import drop_path_rate_of_layer
from scalerun.modules.embedding import InputEmbedding, TokenEmbedding
from scalerun.modules.feed_forward import GLU, Activation, FeedForward, PerToken
from scalerun.modules.linear import Linear
from scalerun.modules.mixer import Mixer
from scalerun.modules.norm import LayerNorm, RMSNorm
from scalerun.modules.positions.base_position import AbsolutePosition, BasePosition
from scalerun.modules.positions.learned import LearnedPositions
from scalerun.modules.positions.relative_bias import RelativeBias
from scalerun.modules.positions.rotary import Rotary
from scalerun.modules.positions.sinusoidal import SinusoidalPositions
from scalerun.modules.positions.xpos import XPos
from scalerun.modules.residual import DeepNorm, PostNorm, PreNorm, Residual

ACTIVATIONS: dict[str, Activation] = {"relu": F.relu, "gelu": F.gelu, "swish": F.silu}


class TransformerParts:
    """Makes the parts of one decoder.

    A new architecture overrides the method that makes its new part, and nothing else.

    Args:
        cfg: sizes and rates.
        vocab_size: rows of the embedding.
        padding_idx: number of the padding symbol.
        axes: which parts; by default what ``cfg`` chooses.
    """

    def __init__(
        self,
        cfg: TransformerConfig,
        *,
        vocab_size: int,
        padding_idx: int | None,
        axes: Axes | None = None,
    ) -> None:
        self.cfg = cfg
        self.vocab_size = vocab_size
        self.padding_idx = padding_idx
        self.axes = cfg.axes() if axes is None else axes
        self.weights = self.init_scheme()

    def init_scheme(self) -> ModelInit:
        """How all weights start."""
        cfg, gain, pad = self.cfg, self.axes.gain, self.padding_idx
        dim = cfg.decoder_embed_dim
        match self.axes.init:
            case "paper":
                return init_schemes.paper(dim, gain=gain, padding_idx=pad)
            case "torchscale":
                return init_schemes.torchscale(
                    dim, cfg.decoder_ffn_embed_dim, gain=gain, padding_idx=pad
                )
            case "megatron":
                return init_schemes.megatron(
                    cfg.decoder_layers, sigma=cfg.megatron_init_sigma, padding_idx=pad
                )
        raise AssertionError(self.axes.init)

    def norm(self, dim: int) -> nn.Module:
        """A norm over ``dim`` features."""
        match self.axes.norm:
            case "layer_norm":
                return LayerNorm(dim, self.cfg.layernorm_eps)
            case "rms_norm":
                return RMSNorm(dim, self.cfg.layernorm_eps)
        raise AssertionError(self.axes.norm)

    def mixer(self, layer: int) -> Mixer:
        """The part of a layer (from 0) that mixes tokens."""
        cfg = self.cfg
        match self.axes.mixer:
            case "attention":
                return Attention(
                    cfg.decoder_embed_dim,
                    cfg.decoder_attention_heads,
                    init=self.weights.attention,
                    dropout=cfg.attention_dropout,
                    inner_norm=self.norm(cfg.decoder_embed_dim) if self.axes.inner_norm else None,
                )
        raise AssertionError(self.axes.mixer)

    def ffn(self, layer: int) -> PerToken:
        """The per-token part of a layer (from 0)."""
        cfg = self.cfg
        kinds: dict[str, type[FeedForward] | type[GLU]] = {"ffn": FeedForward, "glu": GLU}
        return kinds[self.axes.ffn](
            cfg.decoder_embed_dim,
            cfg.decoder_ffn_embed_dim,
            init=self.weights.ffn,
            activation=ACTIVATIONS[cfg.activation_fn],
            activation_dropout=cfg.activation_dropout,
            inner_norm=self.norm(cfg.decoder_ffn_embed_dim) if self.axes.inner_norm else None,
        )

    def residual(self, layer: int) -> Residual:
        """What surrounds each branch of a layer (from 0)."""
        cfg = self.cfg
        kinds: dict[str, Callable[..., Residual]] = {
            "pre_norm": PreNorm,
            "post_norm": PostNorm,
            "deep_norm": DeepNorm,
        }
        return kinds[self.axes.residual](
            self.norm(cfg.decoder_embed_dim),
            alpha=self.axes.alpha,
            dropout=cfg.dropout,
            drop_path=drop_path_rate_of_layer(
                cfg.drop_path_rate, layer=layer, num_layers=cfg.decoder_layers
            ),
        )

    def block(self, layer: int) -> TransformerBlock:
        """A whole layer (from 0)."""
        return TransformerBlock(
            self.mixer(layer),
            self.ffn(layer),
            mixer_residual=self.residual(layer),
            ffn_residual=self.residual(layer),
        )

    def absolute_position(self) -> AbsolutePosition | None:
        """What is added to the embedding."""
        cfg = self.cfg
        match self.axes.absolute_position:
            case "learned":
                return LearnedPositions(
                    cfg.max_target_positions, cfg.decoder_embed_dim, init=self.weights.positions
                )
            case "sinusoidal":
                return SinusoidalPositions(cfg.decoder_embed_dim)
            case "none":
                return None
        raise AssertionError(self.axes.absolute_position)

    def relative_position(self) -> BasePosition | None:
        """What the mixers are handed."""
        cfg = self.cfg
        match self.axes.relative_position:
            case "rotary":
                return Rotary(cfg.head_dim)
            case "xpos":
                return XPos(cfg.head_dim, cfg.xpos_scale_base)
            case "relative_bias":
                return RelativeBias(
                    cfg.rel_pos_buckets,
                    cfg.max_rel_pos,
                    num_heads=cfg.decoder_attention_heads,
                    init=self.weights.relative_bias,
                )
            case "none":
                return None
        raise AssertionError(self.axes.relative_position)

    def embedding(self) -> InputEmbedding:
        """From token numbers to the first layer's input."""
        cfg = self.cfg
        dim = cfg.decoder_embed_dim
        return InputEmbedding(
            TokenEmbedding(
                self.vocab_size, dim, padding_idx=self.padding_idx, init=self.weights.embedding
            ),
            self.absolute_position(),
            norm=self.norm(dim) if cfg.layernorm_embedding else None,
            scale=1.0 if cfg.no_scale_embedding else math.sqrt(dim),
            dropout=0.0 if cfg.no_emb_dropout else cfg.dropout,
        )

    def final_norm(self) -> nn.Module | None:
        """The norm after the last block; a post-norm stack has none."""
        return self.norm(self.cfg.decoder_embed_dim) if self.axes.residual == "pre_norm" else None

    def output_projection(self) -> Linear | None:
        """From features to logits; None to use the token embedding."""
        if self.cfg.share_decoder_input_output_embed:
            return None
        return Linear(
            self.cfg.decoder_embed_dim, self.vocab_size, init=self.weights.output, bias=False
        )
