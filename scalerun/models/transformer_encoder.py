"""A stack of blocks whose tokens all see each other.

B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.distributed.mesh import ONE_RANK, ModelMeshes
from scalerun.distributed.sharding import part_of
from scalerun.models.attention_config import AttentionConfig
from scalerun.models.base_model import BaseModel, register_model
from scalerun.models.blocks import TransformerParts
from scalerun.models.sides import EncoderSide, check_norm_placement
from scalerun.models.stack import Stack
from scalerun.models.transformer_stack import TransformerStack
from scalerun.modules.attention_mask import fold_into_bias
from scalerun.modules.auxiliary import Auxiliary
from scalerun.modules.block_context import BlockContext
from scalerun.modules.embedding import InputEmbedding
from scalerun.modules.linear import product_dtype
from scalerun.modules.megatron.mappings import (
    TIME,
    copy_to,
    gather_from,
    gather_from_sequence,
    scatter_to,
    scatter_to_sequence,
)
from scalerun.modules.norm import normed
from scalerun.modules.positions.base_position import positions_after_left_padding
from scalerun.modules.residual import deepnorm_alpha, deepnorm_gain, subln_gain

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

MODEL = "transformer_encoder"


@dataclass
class TransformerEncoderConfig(AttentionConfig, EncoderSide):
    """Settings of an encoder; names and meanings are TorchScale's."""

    free_settings = AttentionConfig.free_settings | {"max_source_positions"}

    share_encoder_input_output_embed: bool = option(
        False, "use the encoder's token embedding as output projection"
    )
    no_output_layer: bool = option(False, "no output projection: the model returns features alone")
    multiway: bool = option(
        False, "a half of each block for either of two kinds of tokens, such as image and text"
    )

    def validate(self) -> None:
        super().validate()
        check_norm_placement(self, self.encoder_normalize_before, "encoder")
        if self.no_output_layer and self.share_encoder_input_output_embed:
            raise ConfigError(
                "--no-output-layer and --share-encoder-input-output-embed exclude each other; "
                "give one of them"
            )

    def stacks(self) -> list[Stack]:
        return [self.encoder_stack()]

    def encoder_stack(self) -> Stack:
        """The one stack of the model."""
        layers = max(self.encoder_layers, 1)
        return encoder_stack(
            self,
            self,
            alpha=deepnorm_alpha(layers),
            gain=(deepnorm_gain if self.deepnorm else subln_gain)(layers),
            tied_output=self.share_encoder_input_output_embed,
            multiway=self.multiway,
        )


def encoder_stack(
    cfg: AttentionConfig,
    side: EncoderSide,
    *,
    alpha: float,
    gain: float,
    tied_output: bool = False,
    multiway: bool = False,
) -> Stack:
    """The stack that an encoder's settings describe."""
    axes = cfg.axes_for(
        normalize_before=side.encoder_normalize_before,
        learned=side.encoder_learned_pos,
        alpha=alpha,
        gain=gain,
    )
    return Stack(
        side="encoder",
        axes=axes,
        dim=side.encoder_embed_dim,
        ffn_dim=side.encoder_ffn_embed_dim,
        num_layers=side.encoder_layers,
        num_heads=side.encoder_attention_heads,
        max_positions=side.max_source_positions,
        tied_output=tied_output,
        final_norm=axes.residual == "pre_norm" and side.normalize_output,
        multiway=multiway,
        zero_keys=side.encoder_zero_keys,
    )


class EncoderOutput(NamedTuple):
    """What an encoder returns."""

    features: Tensor
    """(B, T, D) after the last norm."""
    logits: Tensor | None = None
    """(B, T, V), or (N, V) of selected tokens; None for a model without an output layer. This
    rank's part of V where :attr:`vocab_mesh` is not None."""
    reports: tuple[Auxiliary, ...] = ()
    """One for each layer that has an auxiliary loss."""
    vocab_mesh: DeviceMesh | None = None
    """Axis that the vocabulary is spread over; None if each rank has all of it."""

    def whole_logits(self) -> Tensor | None:
        """The logits of the whole vocabulary; all ranks of the axis have to call it."""
        return None if self.logits is None else gather_from(self.logits, self.vocab_mesh)


@register_model(MODEL, TransformerEncoderConfig)
class TransformerEncoder(TransformerStack, BaseModel):
    """Embed, run the blocks, norm, project to the vocabulary if there is a projection.

    Args:
        parts: makes all parts.
        embedding: from token numbers to (B, T, D); None for one that the parts make.
        output_layer: whether :attr:`EncoderOutput.logits` are wanted at all.
    """

    parts_class: type[TransformerParts] = TransformerParts

    def __init__(
        self,
        parts: TransformerParts,
        embedding: InputEmbedding | None = None,
        *,
        output_layer: bool = True,
    ) -> None:
        super().__init__(parts, embedding)
        self.has_output = output_layer
        self.output_projection = parts.output_projection() if output_layer else None

    @classmethod
    def build_model(
        cls,
        cfg: ScalerunDataclass,
        *,
        vocab_size: int,
        padding_idx: int | None,
        meshes: ModelMeshes = ONE_RANK,
    ) -> Self:
        assert isinstance(cfg, TransformerEncoderConfig)
        parts = cls.parts_class(
            cfg,
            cfg.encoder_stack(),
            vocab_size=vocab_size,
            padding_idx=padding_idx,
            meshes=meshes,
        )
        return cls(parts, output_layer=not cfg.no_output_layer)

    def forward(
        self,
        tokens_BT: Tensor | None = None,
        *,
        token_embeddings_BTD: Tensor | None = None,
        padding_mask_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        hidden_TT: Tensor | None = None,
        split: int | None = None,
        selected_N: Tensor | None = None,
    ) -> EncoderOutput:
        """Features, and logits, of every token.

        Args:
            tokens_BT: (B, T) int64.
            token_embeddings_BTD: vectors in place of the tokens', such as those of image patches.
            padding_mask_BT: (B, T) bool, True for padding, on either side: no token sees it, and
                its own results mean nothing.
            positions_BT: (B, T) int64 from 0, for tables of absolute positions; by default they
                count from the first token that is not padding.
            hidden_TT: (T, T) bool, True where query (row) may not see key (column).
            split: tokens of the first kind, for multiway layers; None if all are.
            selected_N: (N,) int64, which of the B * T tokens, row by row, logits are wanted of;
                None for all.

        Raises:
            ValueError: neither or both of tokens and vectors are given, more tokens than learned
                positions, or ``hidden_TT`` for mixers with a rule of their own.
        """
        if (tokens_BT is None) == (token_embeddings_BTD is None):
            raise ValueError("an encoder reads either tokens or token embeddings")
        given = token_embeddings_BTD if tokens_BT is None else tokens_BT
        assert given is not None
        num_tokens, device = given.shape[1], given.device
        time_mesh = self.time_mesh(num_tokens)
        if token_embeddings_BTD is None:
            x_BTD = self.embedding.tokens(tokens_BT, time_mesh)
        else:
            x_BTD = scatter_to_sequence(token_embeddings_BTD, time_mesh)
        self.check_positions(positions_BT, num_tokens)
        counted_BT = positions_after_left_padding(padding_mask_BT, num_tokens, device)
        context = self._context(counted_BT, padding_mask_BT, hidden_TT, dtype=product_dtype(x_BTD))
        context = replace(context, split=split, time_mesh=time_mesh)
        x_BTD = self.embedding.place(
            x_BTD,
            counted_BT if positions_BT is None else positions_BT,
            context=context,
        )
        if padding_mask_BT is not None:
            own_BT = scatter_to(padding_mask_BT, time_mesh, TIME)
            x_BTD = x_BTD.masked_fill(own_BT.unsqueeze(-1), 0.0)
        x_BTD, reports = self.run_layers(x_BTD, context)
        if self.final_norm is not None:
            x_BTD = normed(self.final_norm, x_BTD, context)
        x_BTD = gather_from_sequence(x_BTD, time_mesh, partial_gradient=False)
        shown = x_BTD if selected_N is None else x_BTD.flatten(0, 1).index_select(0, selected_N)
        return EncoderOutput(x_BTD, self.logits(shown), tuple(reports), self.vocab_mesh)

    def _context(
        self,
        positions_BT: Tensor,
        padding_BT: Tensor | None,
        hidden_TT: Tensor | None,
        *,
        dtype: torch.dtype,
    ) -> BlockContext:
        """Rotation tables and score biases, computed once for all layers."""
        num_tokens = positions_BT.shape[1]
        rotation = bias_BHTT = None
        if self.relative_position is not None:
            rotation = self.relative_position.rotation(positions_BT, center=(num_tokens + 1) // 2)
            bias_BHTT = self.relative_position.bias(positions_BT, positions_BT)
        context = BlockContext(rotation=rotation, padding_BS=padding_BT, positions_BT=positions_BT)
        if not self.reads_bias:
            if hidden_TT is not None:
                raise ValueError("this model's mixers cannot hide single keys from queries")
            return context
        if padding_BT is None and hidden_TT is None:
            return replace(context, bias_BHTS=None if bias_BHTT is None else bias_BHTT.to(dtype))
        seen_B1TT = torch.ones(
            (1, 1, num_tokens, num_tokens), dtype=torch.bool, device=positions_BT.device
        )
        if hidden_TT is not None:
            seen_B1TT = seen_B1TT & ~hidden_TT.bool()
        if padding_BT is not None:
            seen_B1TT = seen_B1TT & ~padding_BT[:, None, None, :]
        bias_BHTT, empty_rows = fold_into_bias(seen_B1TT, bias_BHTT, dtype=dtype)
        return replace(context, bias_BHTS=bias_BHTT, empty_rows_B1T1=empty_rows)

    def logits(self, x_BTD: Tensor) -> Tensor | None:
        """(..., V) from (..., D) features, or this rank's part of the vocabulary, or None."""
        if not self.has_output:
            return None
        x_BTD = copy_to(x_BTD, self.vocab_mesh)
        if self.output_projection is not None:
            return self.output_projection(x_BTD)
        return F.linear(x_BTD, part_of(self.embedding.tokens.weight, self.vocab_mesh))

    def training_flops_per_token(self, sequence_length: int) -> int:
        output = self.embedding.tokens.weight.numel() if self.has_output else 0
        return self.flops_per_token(sequence_length) + 6 * output
