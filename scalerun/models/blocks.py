"""From the five axes of a stack to parts: the only match on the names of parts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import nn

from scalerun.distributed.mesh import ONE_RANK, ModelMeshes
from scalerun.models import init_schemes
from scalerun.models.attention_config import AttentionConfig
from scalerun.models.block_config import BlockConfig
from scalerun.models.init_schemes import ModelInit
from scalerun.models.stack import Stack
from scalerun.modules.activations import ACTIVATIONS
from scalerun.modules.attention import Attention, CrossAttention
from scalerun.modules.block import TransformerBlock
from scalerun.modules.dilated_attention import DilatedAttention
from scalerun.modules.drop_path import drop_path_rate_of_layer
from scalerun.modules.embedding import InputEmbedding, TokenEmbedding
from scalerun.modules.feed_forward import GLU, FeedForward
from scalerun.modules.linear import Linear
from scalerun.modules.megatron.layers import ColumnParallelLinear, VocabParallelEmbedding
from scalerun.modules.mixer import Mixer
from scalerun.modules.moe.experts import ExpertPlacement, Experts, StackedNorm
from scalerun.modules.moe.gates import GATES
from scalerun.modules.moe.moe_layer import MoELayer
from scalerun.modules.moe.router import Router
from scalerun.modules.multiway import Multiway, MultiwayPerToken, MultiwayPositions
from scalerun.modules.norm import LayerNorm, RMSNorm
from scalerun.modules.per_token import PerToken
from scalerun.modules.positions.base_position import AbsolutePosition, BasePosition
from scalerun.modules.positions.learned import LearnedPositions
from scalerun.modules.positions.relative_bias import RelativeBias
from scalerun.modules.positions.rotary import Rotary
from scalerun.modules.positions.sinusoidal import SinusoidalPositions
from scalerun.modules.positions.xpos import XPos
from scalerun.modules.residual import DeepNorm, PostNorm, PreNorm, Residual


class StackParts(ABC):
    """Makes the parts of one stack, an encoder's or a decoder's, whatever mixes its tokens.

    Args:
        cfg: rates and norms.
        stack: sizes, and which parts.
        vocab_size: rows of the embedding.
        padding_idx: number of the padding symbol.
        meshes: axes to spread layers over.

    Raises:
        ConfigError: the experts cannot be spread over their axis.
    """

    def __init__(
        self,
        cfg: BlockConfig,
        stack: Stack,
        *,
        vocab_size: int,
        padding_idx: int | None,
        meshes: ModelMeshes = ONE_RANK,
    ) -> None:
        self.cfg = cfg
        self.stack = stack
        self.axes = stack.axes
        self.vocab_size = vocab_size
        self.padding_idx = padding_idx
        self.meshes = meshes
        if meshes.expert is not None:
            cfg.check_expert_parallel(meshes.expert.size())
        self.weights = self.init_scheme(self.axes.gain)

    def init_scheme(self, gain: float) -> ModelInit:
        """How all weights start; ``gain`` is that of value, output and feed-forward weights."""
        stack, pad = self.stack, self.padding_idx
        match self.axes.init:
            case "paper":
                return init_schemes.paper(stack.dim, gain=gain, padding_idx=pad)
            case "torchscale":
                return init_schemes.torchscale(stack.dim, stack.ffn_dim, gain=gain, padding_idx=pad)
            case "bert":
                return init_schemes.bert(gain=gain, padding_idx=pad)
            case "megatron":
                return init_schemes.megatron(
                    stack.num_layers, sigma=self.cfg.megatron_init_sigma, padding_idx=pad
                )
        raise AssertionError(self.axes.init)

    def one_norm(self, dim: int) -> nn.Module:
        """A norm over ``dim`` features."""
        match self.axes.norm:
            case "layer_norm":
                return LayerNorm(dim, self.cfg.layernorm_eps)
            case "rms_norm":
                return RMSNorm(dim, self.cfg.layernorm_eps)
        raise AssertionError(self.axes.norm)

    def norm(self, dim: int) -> nn.Module:
        """The same, or one for each half of a multiway stack."""
        if self.stack.multiway:
            return Multiway(self.one_norm(dim), self.one_norm(dim))
        return self.one_norm(dim)

    def inner_norm(self, dim: int) -> nn.Module | None:
        """The norm inside a branch, which shares its features as the branch does; or None."""
        if not self.axes.inner_norm:
            return None
        norm, mesh = self.one_norm(dim), self.meshes.tensor
        if mesh is not None and type(norm) in (LayerNorm, RMSNorm):
            assert isinstance(norm, LayerNorm | RMSNorm)
            norm.spread_over(mesh)
        return norm

    @abstractmethod
    def mixer(self, layer: int) -> Mixer:
        """The part of a layer (from 0) that mixes tokens."""

    def cross_mixer(self, layer: int) -> Mixer | None:
        """The part of a layer (from 0) that reads an encoder's output; None without one."""
        return None

    def relative_position(self) -> BasePosition | None:
        """What the mixers are handed."""
        return None

    def cross_position(self) -> RelativeBias | None:
        """The score biases of the cross mixers."""
        return None

    def ffn(self, layer: int) -> PerToken:
        """The per-token part of a layer (from 0)."""
        if self.stack.multiway:
            return MultiwayPerToken(self.dense_ffn(), self.dense_ffn())
        return self.moe_layer() if self.cfg.is_moe_layer(layer) else self.dense_ffn()

    def dense_ffn(self) -> PerToken:
        """A feed-forward layer that all tokens go through."""
        kinds: dict[str, type[FeedForward] | type[GLU]] = {"ffn": FeedForward, "glu": GLU}
        return kinds[self.axes.ffn](
            self.stack.dim,
            self.stack.ffn_dim,
            init=self.weights.ffn,
            activation=ACTIVATIONS[self.cfg.activation_fn],
            activation_dropout=self.cfg.activation_dropout,
            inner_norm=self.inner_norm(self.stack.ffn_dim),
            tp_mesh=self.meshes.tensor,
        )

    def moe_layer(self) -> MoELayer:
        """A layer whose tokens go to experts: feed-forward layers, whatever the dense ones are."""
        cfg, dim, ffn_dim = self.cfg, self.stack.dim, self.stack.ffn_dim
        num_experts, rms = cfg.moe_expert_count, self.axes.norm == "rms_norm"
        meshes = self.meshes
        placement = ExpertPlacement(
            num_experts, meshes.expert, meshes.tensor, meshes.expert_weights
        )
        norm = StackedNorm(placement, ffn_dim, eps=cfg.layernorm_eps, rms=rms)
        experts = Experts(
            placement,
            dim,
            ffn_dim,
            init=self.weights.ffn,
            activation=ACTIVATIONS[cfg.activation_fn],
            activation_dropout=cfg.activation_dropout,
            dropout=cfg.dropout,
            inner_norm=norm if cfg.subln else None,
        )
        gate = GATES[cfg.gate_name()](dim, num_experts, init=self.weights.gate)
        return MoELayer(
            Router(gate, cfg.gating()),
            experts,
            mask_padding=cfg.moe_mask_padding,
            time_major=self.stack.side == "encoder",
        )

    def ffn_residual(self, layer: int) -> Residual:
        """What surrounds the per-token part of a layer (from 0); experts have their own dropout."""
        residual = self.residual(layer)
        if self.cfg.is_moe_layer(layer):
            residual.dropout = 0.0
        return residual

    def residual(self, layer: int) -> Residual:
        """What surrounds each branch of a layer (from 0)."""
        kinds: dict[str, Callable[..., Residual]] = {
            "pre_norm": PreNorm,
            "post_norm": PostNorm,
            "deep_norm": DeepNorm,
        }
        return kinds[self.axes.residual](
            self.norm(self.stack.dim),
            alpha=self.axes.alpha,
            dropout=self.cfg.dropout,
            drop_path=drop_path_rate_of_layer(
                self.cfg.drop_path_rate, layer=layer, num_layers=self.stack.num_layers
            ),
        )

    def block(self, layer: int) -> TransformerBlock:
        """A whole layer (from 0)."""
        cross_mixer = self.cross_mixer(layer)
        return TransformerBlock(
            self.mixer(layer),
            self.ffn(layer),
            mixer_residual=self.residual(layer),
            ffn_residual=self.ffn_residual(layer),
            cross_mixer=cross_mixer,
            cross_residual=None if cross_mixer is None else self.residual(layer),
        )

    def blocks(self) -> list[TransformerBlock]:
        """All layers, in order."""
        return [self.block(layer) for layer in range(self.stack.num_layers)]

    def absolute_position(self) -> AbsolutePosition | None:
        """What is added to the embedding; a table for each kind of token in a multiway stack."""
        if self.stack.multiway and self.axes.absolute_position == "learned":
            return MultiwayPositions(self.learned_positions(), self.learned_positions())
        match self.axes.absolute_position:
            case "learned":
                return self.learned_positions()
            case "sinusoidal":
                return SinusoidalPositions(self.stack.dim)
            case "none":
                return None
        raise AssertionError(self.axes.absolute_position)

    def learned_positions(self) -> LearnedPositions:
        """A table of positions."""
        return LearnedPositions(
            self.stack.max_positions, self.stack.dim, init=self.weights.positions
        )

    def token_embedding(self) -> TokenEmbedding:
        """The table of token vectors."""
        return VocabParallelEmbedding(
            self.vocab_size,
            self.stack.dim,
            padding_idx=self.padding_idx,
            init=self.weights.embedding,
            tp_mesh=self.meshes.tensor,
        )

    def embedding(self, tokens: TokenEmbedding | None = None) -> InputEmbedding:
        """From token numbers to the first layer's input.

        Args:
            tokens: a table to share; None for one of its own.
        """
        cfg, dim = self.cfg, self.stack.dim
        return InputEmbedding(
            self.token_embedding() if tokens is None else tokens,
            self.absolute_position(),
            norm=self.norm(dim) if cfg.layernorm_embedding else None,
            scale=1.0 if cfg.no_scale_embedding else math.sqrt(dim),
            dropout=0.0 if cfg.no_emb_dropout else cfg.dropout,
        )

    def final_norm(self) -> nn.Module | None:
        """The norm after the last block; a post-norm stack has none."""
        return self.norm(self.stack.dim) if self.stack.final_norm else None

    def output_projection(self) -> Linear | None:
        """From features to logits; None to use the token embedding."""
        if self.stack.tied_output:
            return None
        return ColumnParallelLinear(
            self.stack.dim,
            self.vocab_size,
            init=self.weights.output,
            bias=False,
            tp_mesh=self.meshes.tensor,
            copy_input=False,
        )


class TransformerParts(StackParts):
    """Makes the parts of a stack whose mixer is attention.

    A new architecture overrides the method that makes its new part, and nothing else.
    """

    cfg: AttentionConfig

    def mixer(self, layer: int) -> Mixer:
        """The part of a layer (from 0) that mixes tokens."""
        match self.axes.mixer:
            case "attention":
                return Attention(
                    self.stack.dim,
                    self.stack.num_heads,
                    init=self.weights.attention,
                    dropout=self.cfg.attention_dropout,
                    inner_norm=self.attention_norm(),
                    multiway=self.stack.multiway,
                    tp_mesh=self.meshes.tensor,
                )
            case "dilated_attention":
                return DilatedAttention(
                    self.stack.dim,
                    self.stack.num_heads,
                    init=self.weights.attention,
                    dilation=self.cfg.dilation(zero_keys=self.stack.zero_keys),
                    dropout=self.cfg.attention_dropout,
                    inner_norm=self.attention_norm(),
                    multiway=self.stack.multiway,
                    tp_mesh=self.meshes.tensor,
                )
        raise AssertionError(self.axes.mixer)

    def attention_norm(self) -> nn.Module | None:
        """The norm inside of attention, or one for each half of a multiway stack; or None."""
        dim = self.stack.dim
        norm = self.inner_norm(dim)
        if norm is None or not self.stack.multiway:
            return norm
        other = self.inner_norm(dim)
        assert other is not None
        return Multiway(norm, other)

    def cross_mixer(self, layer: int) -> Mixer | None:
        """The part of a layer (from 0) that reads an encoder's output; None without one.

        As in TorchScale it has no inner norm, and SubLN does not scale its initial weights.
        """
        if not self.stack.cross_attention:
            return None
        gain = self.axes.gain if self.cfg.deepnorm else 1.0
        return CrossAttention(
            self.stack.dim,
            self.stack.num_heads,
            init=self.init_scheme(gain).attention,
            dropout=self.cfg.attention_dropout,
            tp_mesh=self.meshes.tensor,
        )

    def relative_position(self) -> BasePosition | None:
        """What the mixers are handed."""
        match self.axes.relative_position:
            case "rotary":
                return Rotary(self.stack.head_dim)
            case "xpos":
                return XPos(self.stack.head_dim, self.cfg.xpos_scale_base)
            case "relative_bias":
                return self.relative_bias()
            case "none":
                return None
        raise AssertionError(self.axes.relative_position)

    def relative_bias(self) -> RelativeBias:
        """A table of score biases."""
        return RelativeBias(
            self.cfg.rel_pos_buckets,
            self.cfg.max_rel_pos,
            num_heads=self.stack.num_heads,
            init=self.weights.relative_bias,
            tp_mesh=self.meshes.tensor,
        )

    def cross_position(self) -> RelativeBias | None:
        """The score biases of cross-attention; only relative biases have a form for it."""
        biased = self.axes.relative_position == "relative_bias"
        return self.relative_bias() if biased and self.stack.cross_attention else None
