"""A stack of blocks that predicts the next token.

B batch, T new tokens, S keys (cached and new), M source tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from scalerun.distributed.mesh import ONE_RANK, ModelMeshes
from scalerun.distributed.sharding import part_of
from scalerun.models.base_decoder import BaseDecoder, DecoderOutput, FeatureLoss
from scalerun.models.blocks import StackParts, TransformerParts
from scalerun.models.transformer_stack import TransformerStack
from scalerun.modules.attention_mask import fold_into_bias, visible_keys
from scalerun.modules.auxiliary import Auxiliary
from scalerun.modules.block_context import BlockContext, Source, spread_over
from scalerun.modules.embedding import InputEmbedding
from scalerun.modules.incremental_state import EncodedSource, IncrementalState
from scalerun.modules.linear import product_dtype
from scalerun.modules.megatron.mappings import enter, gather_from_sequence
from scalerun.modules.norm import normed
from scalerun.modules.positions.base_position import positions_after_left_padding

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

FEW_ROWS = range(4, 17)
"""Rows of a decoding step that a CPU multiplies faster with a large matrix in front."""


def project_to_vocabulary(x_BTD: Tensor, weight_VD: Tensor) -> Tensor:
    """(B, T, V) = x W^T.

    For few rows the kernels of a CPU spend more on arranging a large matrix than on multiplying it,
    unless it is the left factor.
    """
    few = x_BTD.shape[0] * x_BTD.shape[1] in FEW_ROWS
    if few and x_BTD.device.type == "cpu" and not torch.is_grad_enabled():
        return (weight_VD @ x_BTD.flatten(0, 1).T).T.unflatten(0, x_BTD.shape[:2])
    return F.linear(x_BTD, weight_VD)


class TransformerDecoder(TransformerStack, BaseDecoder):
    """Embed, run the blocks, norm, project to the vocabulary; receives the maker of its parts.

    Args:
        parts: makes all parts.
        embedding: from token numbers to (B, T, D); None for one that the parts make.
    """

    parts_class: type[StackParts] = TransformerParts
    takes_loss: ClassVar[bool] = True

    def __init__(self, parts: StackParts, embedding: InputEmbedding | None = None) -> None:
        super().__init__(parts, embedding)
        self.cross_position = parts.cross_position()
        self.output_projection = parts.output_projection()

    @classmethod
    def build_model(
        cls,
        cfg: Any,
        *,
        vocab_size: int,
        padding_idx: int | None,
        meshes: ModelMeshes = ONE_RANK,
    ) -> Self:
        return cls(
            cls.parts_class(
                cfg,
                cfg.decoder_stack(),
                vocab_size=vocab_size,
                padding_idx=padding_idx,
                meshes=meshes,
            )
        )

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        padding_mask_BT: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        last_token_only: bool = False,
        source: EncodedSource | None = None,
        loss: FeatureLoss | None = None,
    ) -> DecoderOutput:
        """As in :class:`BaseDecoder`.

        Args:
            source: what cross-attention reads; with an incremental state given once.
            loss: computed in place of the logits.
        """
        num_tokens = tokens_BT.shape[1]
        arranged = positions_BT is not None or document_ids_BT is not None
        state = self._begun(incremental_state, tokens_BT.shape, arranged=arranged, source=source)
        self.check_positions(positions_BT, state.length + num_tokens)
        queries_BT, keys_BS, padding_BS = state.place(
            padding_mask_BT, num_tokens=num_tokens, device=tokens_BT.device
        )
        whole = incremental_state is not None or last_token_only
        time_mesh = None if whole else self.time_mesh(num_tokens)
        x_BTD = self.embedding(
            tokens_BT, queries_BT if positions_BT is None else positions_BT, time_mesh=time_mesh
        )
        context = self._context(
            queries_BT,
            keys_BS,
            padding_BS=padding_BS,
            document_ids_BT=document_ids_BT,
            center=(state.max_length + 1) // 2,
            dtype=product_dtype(x_BTD),
        )
        if state.source is not None:
            read = self._source(state.source, queries_BT, dtype=product_dtype(x_BTD))
            context = replace(context, source=read)
        if time_mesh is not None:
            context = replace(context, time_mesh=time_mesh)
        x_BTD, reports = self.run_layers(x_BTD, context, state=state)
        state.advance(num_tokens)
        return self._output(x_BTD[:, -1:] if last_token_only else x_BTD, reports, loss, time_mesh)

    def _begun(
        self,
        state: IncrementalState | None,
        shape: tuple[int, ...],
        *,
        arranged: bool,
        source: EncodedSource | None,
    ) -> IncrementalState:
        """The state that tokens (B, T) extend; without one, a state that keeps nothing.

        Where ranks share sequences it begins with the slices, also of T tokens, of earlier ranks.

        Args:
            arranged: positions or documents are given, which follow from a state.
            source: what cross-attention reads, unless the state knows it.
        """
        batch_size, num_tokens = shape
        mesh = self.sequence_mesh
        if state is None:
            num_slices, earlier = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
            max_length = num_slices * num_tokens
            state = IncrementalState([], batch_size=batch_size, max_length=max_length)
            state.advance(earlier * num_tokens)
        elif mesh is not None:
            raise ValueError("ranks that share sequences cannot decode with a state")
        elif arranged:
            raise ValueError("an incremental state excludes positions_BT and document_ids_BT")
        state.check(batch_size, num_tokens)
        if source is not None:
            state.source = source
        return state

    @property
    def shares_sequences(self) -> bool:
        blocks = self.blocks()
        shared = (block.mixer.shares_sequences and block.cross_mixer is None for block in blocks)
        return len(blocks) == len(self.layers) and all(shared)

    def slice_length(self, num_tokens: int) -> int:
        if self.sequence_mesh is None:
            return num_tokens
        num_ranks, length = self.sequence_mesh.size(), 0
        longer = -(-num_tokens // num_ranks)
        while longer > length:
            length = longer
            total = length * num_ranks
            longer = max(each.mixer.slice_length(total, num_ranks) for each in self.blocks())
        return length

    @property
    def masks_documents(self) -> bool:
        return self.reads_bias

    @property
    def reads_positions(self) -> bool:
        return self.embedding.positions is not None

    def _context(
        self,
        queries_BT: Tensor,
        keys_BS: Tensor,
        *,
        padding_BS: Tensor | None,
        document_ids_BT: Tensor | None,
        center: int,
        dtype: torch.dtype,
    ) -> BlockContext:
        """Rotation tables and score biases, computed once for all layers."""
        num_queries, num_keys = queries_BT.shape[1], keys_BS.shape[1]
        start = num_keys - num_queries
        rotation = bias_BHTS = None
        if self.relative_position is not None:
            rotation = self.relative_position.rotation(queries_BT, center=center)
            bias_BHTS = self.relative_position.bias(queries_BT, keys_BS)
        context = BlockContext(
            rotation=rotation,
            padding_BS=padding_BS,
            positions_BT=queries_BT,
            start=start,
            sequence_mesh=self.sequence_mesh,
        )
        if not self.reads_bias:
            if document_ids_BT is not None:
                raise ValueError("this model's mixers cannot keep documents apart")
            return replace(context, causal=True)
        unrestricted = padding_BS is None and document_ids_BT is None and bias_BHTS is None
        if unrestricted and (start == 0 or num_queries == 1):
            return replace(context, causal=num_queries > 1)
        seen_B1TS = visible_keys(
            num_queries,
            num_keys,
            padding_BS=padding_BS,
            document_ids_BS=document_ids_BT,
            device=queries_BT.device,
        )
        bias_BHTS, empty_rows = fold_into_bias(seen_B1TS, bias_BHTS, dtype=dtype)
        return replace(
            context,
            bias_BHTS=bias_BHTS,
            empty_rows_B1T1=None if padding_BS is None else empty_rows,
        )

    def _source(self, source: EncodedSource, queries_BT: Tensor, *, dtype: torch.dtype) -> Source:
        """What cross-attention reads, with its mask and its relative bias."""
        num_keys, device = source.features_BMD.shape[1], queries_BT.device
        bias_BHTM = None
        if self.cross_position is not None:
            keys_BM = positions_after_left_padding(source.padding_BM, num_keys, device)
            bias_BHTM = self.cross_position.bias(queries_BT, keys_BM)
        if source.padding_BM is None:
            bias_BHTM = None if bias_BHTM is None else bias_BHTM.to(dtype)
            return Source(source.features_BMD, bias_BHTM)
        seen_B1TM = ~source.padding_BM[:, None, None, :].expand(-1, 1, queries_BT.shape[1], -1)
        bias_BHTM, empty_rows = fold_into_bias(seen_B1TM, bias_BHTM, dtype=dtype)
        return Source(source.features_BMD, bias_BHTM, empty_rows)

    def _output(
        self,
        x_BTD: Tensor,
        reports: list[Auxiliary],
        loss: FeatureLoss | None,
        time_mesh: DeviceMesh | None,
    ) -> DecoderOutput:
        """The logits, or the loss in their place."""
        mesh = self.vocab_mesh
        if loss is None:
            return DecoderOutput(self.logits(x_BTD, time_mesh), tuple(reports), vocab_mesh=mesh)
        found = loss(self.features(x_BTD, time_mesh), self.vocabulary_weight(), mesh)
        return DecoderOutput(None, tuple(reports), found)

    def logits(self, x_BTD: Tensor, time_mesh: DeviceMesh | None = None) -> Tensor:
        """(B, T, V) from what the last block returns, or this rank's part of the vocabulary."""
        return project_to_vocabulary(self.features(x_BTD, time_mesh), self.vocabulary_weight())

    def features(self, x_BTD: Tensor, time_mesh: DeviceMesh | None = None) -> Tensor:
        """What is projected to the vocabulary, of all tokens, from what the last block returns.

        Args:
            time_mesh: axis that the tokens of the last block are spread over.
        """
        if self.final_norm is not None:
            x_BTD = normed(self.final_norm, x_BTD, spread_over(time_mesh))
        if self.vocab_mesh is None:
            return gather_from_sequence(x_BTD, time_mesh, partial_gradient=False)
        return enter(x_BTD, self.vocab_mesh, time_mesh)

    def vocabulary_weight(self) -> Tensor:
        """(V, D), the weight of the output projection, or this rank's rows of it."""
        projection = self.output_projection
        layer = self.embedding.tokens if projection is None else projection
        return part_of(layer.weight, layer.tp_mesh)

    def init_incremental_state(self, batch_size: int, max_length: int) -> IncrementalState:
        layers = [block.init_state(batch_size, max_length) for block in self.blocks()]
        return IncrementalState(layers, batch_size=batch_size, max_length=max_length)

    def training_flops_per_token(self, sequence_length: int) -> int:
        return self.flops_per_token(sequence_length) + 6 * self.embedding.tokens.weight.numel()
