"""A stack of blocks that predicts the next token.

B batch, T new tokens, S keys (cached and new), D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scalerun.models.base_decoder import BaseDecoder, DecoderOutput
from scalerun.modules.attention_mask import fold_into_bias, visible_keys
from scalerun.modules.block import TransformerBlock
from scalerun.modules.embedding import InputEmbedding
from scalerun.modules.incremental_state import IncrementalState
from scalerun.modules.linear import Linear
from scalerun.modules.mixer import BlockContext
from scalerun.modules.positions.base_position import BasePosition


class TransformerDecoder(BaseDecoder):
    """Embed, run the blocks, norm, project to the vocabulary; receives built parts.

    Args:
        embedding: from token numbers to (B, T, D).
        layers: the blocks, in order.
        final_norm: norm before the projection, or None.
        output_projection: D -> V, or None to project with the token embedding.
        relative_position: the scheme that all mixers are handed, or None.
        max_positions: the longest sequence (tokens) the model is meant for.
        checkpoint_activations: keep a block's input only and recompute the block in backward.
    """

    def __init__(
        self,
        embedding: InputEmbedding,
        layers: Sequence[TransformerBlock],
        *,
        final_norm: nn.Module | None,
        output_projection: Linear | None,
        relative_position: BasePosition | None,
        max_positions: int,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.relative_position = relative_position
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm
        self.output_projection = output_projection
        self.checkpoint_activations = checkpoint_activations
        self._max_positions = max_positions

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        padding_mask_BT: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        last_token_only: bool = False,
    ) -> DecoderOutput:
        batch_size, num_tokens = tokens_BT.shape
        state = incremental_state
        if state is None:
            state = IncrementalState([], batch_size=batch_size, max_length=num_tokens)
        elif positions_BT is not None or document_ids_BT is not None:
            raise ValueError("an incremental state excludes positions_BT and document_ids_BT")
        state.check(batch_size, num_tokens)
        self._check_positions(positions_BT, state.length + num_tokens)
        queries_BT, keys_BS, padding_BS = state.place(
            padding_mask_BT, num_tokens=num_tokens, device=tokens_BT.device
        )
        x_BTD = self.embedding(tokens_BT, queries_BT if positions_BT is None else positions_BT)
        context = self._context(
            queries_BT,
            keys_BS,
            padding_BS=padding_BS,
            document_ids_BT=document_ids_BT,
            center=(state.max_length + 1) // 2,
            dtype=x_BTD.dtype,
        )
        x_BTD, aux_loss = self._run_layers(x_BTD, context, state=state)
        state.advance(num_tokens)
        return DecoderOutput(self._logits(x_BTD[:, -1:] if last_token_only else x_BTD), aux_loss)

    def _check_positions(self, positions_BT: Tensor | None, num_positions: int) -> None:
        limit = self.embedding.num_positions()
        if limit is None:
            return
        # On another device, looking at the largest position would stop the host.
        if positions_BT is not None and positions_BT.device.type == "cpu":
            num_positions = int(positions_BT.max()) + 1
        if num_positions > limit:
            raise ValueError(
                f"{num_positions} tokens exceed the model's {limit} learned positions; shorten the "
                "sequence or train with a larger --max-target-positions"
            )

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
        start, device = num_keys - num_queries, queries_BT.device
        rotation = bias_BHTS = None
        if self.relative_position is not None:
            rotation = self.relative_position.rotation(queries_BT, center=center)
            bias_BHTS = self.relative_position.bias(queries_BT, keys_BS)
        unrestricted = padding_BS is None and document_ids_BT is None and bias_BHTS is None
        if unrestricted and (start == 0 or num_queries == 1):
            return BlockContext(causal=num_queries > 1, rotation=rotation, start=start)
        seen_B1TS = visible_keys(
            num_queries,
            num_keys,
            padding_BS=padding_BS,
            document_ids_BS=document_ids_BT,
            device=device,
        )
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        bias_BHTS, empty_rows = fold_into_bias(seen_B1TS, bias_BHTS, dtype=dtype)
        return BlockContext(
            bias_BHTS=bias_BHTS,
            empty_rows_B1T1=None if padding_BS is None else empty_rows,
            rotation=rotation,
            start=start,
        )

    def _run_layers(
        self, x_BTD: Tensor, context: BlockContext, *, state: IncrementalState
    ) -> tuple[Tensor, Tensor | None]:
        total_loss: Tensor | None = None
        recompute = self.checkpoint_activations and torch.is_grad_enabled()
        for i, layer in enumerate(self.layers):
            if state.layers:
                context = replace(context, state=state.layers[i])
            if recompute:
                x_BTD, aux_loss = checkpoint(layer, x_BTD, context, use_reentrant=False)
            else:
                x_BTD, aux_loss = layer(x_BTD, context)
            if aux_loss is not None:
                total_loss = aux_loss if total_loss is None else total_loss + aux_loss
        return x_BTD, total_loss

    def _logits(self, x_BTD: Tensor) -> Tensor:
        if self.final_norm is not None:
            x_BTD = self.final_norm(x_BTD)
        if self.output_projection is not None:
            return self.output_projection(x_BTD)
        return F.linear(x_BTD, self.embedding.tokens.weight)

    def init_incremental_state(self, batch_size: int, max_length: int) -> IncrementalState:
        layers = [block.init_state(batch_size, max_length) for block in self.blocks()]
        return IncrementalState(layers, batch_size=batch_size, max_length=max_length)

    def max_positions(self) -> int | None:
        return self._max_positions

    def shard_units(self) -> list[nn.Module]:
        return list(self.layers)

    def blocks(self) -> list[TransformerBlock]:
        """The blocks, in order."""
        return [layer for layer in self.layers if isinstance(layer, TransformerBlock)]

    def training_flops_per_token(self, sequence_length: int) -> int:
        blocks = self.blocks()
        weights = sum(block.num_active_weights() for block in blocks)
        weights += self.embedding.tokens.weight.numel()
        mixing = sum(block.mixer.mixing_flops_per_token(sequence_length) for block in blocks)
        return 6 * weights + mixing
