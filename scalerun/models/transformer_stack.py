"""What an encoder and a decoder have in common: an embedding and blocks.

B batch, T new tokens, S keys (cached and new), D model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from scalerun.dataclass.errors import ConfigError
from scalerun.models.blocks import StackParts
from scalerun.modules.auxiliary import Auxiliary
from scalerun.modules.block import TransformerBlock
from scalerun.modules.block_context import BlockContext
from scalerun.modules.embedding import InputEmbedding
from scalerun.modules.incremental_state import IncrementalState
from scalerun.modules.linear import Linear
from scalerun.modules.positions.base_position import BasePosition

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


class TransformerStack(nn.Module):
    """Embedding, blocks and final norm, with the position scheme that all mixers are handed.

    Args:
        parts: makes all of them.
        embedding: from token numbers to (B, T, D); None for one that the parts make.
    """

    output_projection: Linear | None
    """From features to logits; None to use the token embedding."""

    def __init__(self, parts: StackParts, embedding: InputEmbedding | None = None) -> None:
        super().__init__()
        self.embedding = parts.embedding() if embedding is None else embedding
        self.relative_position: BasePosition | None = parts.relative_position()
        self.layers = nn.ModuleList(parts.blocks())
        self.final_norm = parts.final_norm()
        self.sequence_mesh = parts.meshes.sequence
        """Axis whose ranks each have a slice of every sequence; None where sequences are whole."""
        self.activation_memory = parts.cfg.activation_memory()
        self._max_positions = parts.stack.max_positions
        self.reads_bias = any(block.mixer.reads_bias for block in self.blocks())
        """Whether any mixer reads ``context.bias_BHTS``."""
        biased = self.relative_position is not None and self.relative_position.tp_mesh is not None
        if biased and any(block.mixer.tp_mesh is None for block in self.blocks()):
            raise ConfigError(
                "--rel-pos-buckets gives each of the --model-parallel-size ranks the score biases "
                "of its own heads, but a mixer of this --arch computes all heads on each rank; "
                "remove one of the flags"
            )
        self._spread = parts.meshes.tensor if parts.meshes.sequence_parallel else None

    def time_mesh(self, num_tokens: int) -> DeviceMesh | None:
        """Axis to spread so many tokens over between the products of the blocks.

        None without ``--sequence-parallel``, and where the axis does not divide them: each rank has
        all tokens then, with the same results.
        """
        uneven = self._spread is not None and num_tokens % self._spread.size() != 0
        return None if uneven else self._spread

    @property
    def vocab_mesh(self) -> DeviceMesh | None:
        """Axis that the logits' vocabulary is spread over; None if each rank has all of it."""
        projection = self.output_projection
        return self.embedding.tokens.tp_mesh if projection is None else projection.tp_mesh

    def blocks(self) -> list[TransformerBlock]:
        """The blocks, in order."""
        return [layer for layer in self.layers if isinstance(layer, TransformerBlock)]

    def shard_units(self) -> list[nn.Module]:
        """Modules that are each compiled, recomputed and sharded as one."""
        return list(self.layers)

    def max_positions(self) -> int | None:
        """The longest sequence (tokens) the stack is meant for."""
        return self._max_positions

    def check_positions(self, positions_BT: Tensor | None, num_positions: int) -> None:
        """Refuse positions that the table of the embedding does not have.

        Raises:
            ValueError: there are too many.
        """
        limit = self.embedding.num_positions()
        if limit is None:
            return
        # On another device, looking at the largest position would stop the host.
        if positions_BT is not None and positions_BT.device.type == "cpu":
            num_positions = int(positions_BT.max()) + 1
        if num_positions > limit:
            raise ValueError(
                f"{num_positions} tokens exceed the model's {limit} learned positions; shorten the "
                "sequence or train with more (--max-target-positions, --max-source-positions)"
            )

    def run_layers(
        self, x_BTD: Tensor, context: BlockContext, *, state: IncrementalState | None = None
    ) -> tuple[Tensor, list[Auxiliary]]:
        """The stream after the last block, and what the blocks report."""
        reports = []
        for i, layer in enumerate(self.layers):
            if state is not None and state.layers:
                context = context.for_layer(state.layers[i])
            x_BTD, report = self.activation_memory.run(layer, x_BTD, context, number=i)
            if report is not None:
                reports.append(report)
        return x_BTD, reports

    def flops_per_token(self, sequence_length: int) -> int:
        """Floating-point operations of a token's forward and backward in the blocks."""
        blocks = self.blocks()
        weights = sum(block.num_active_weights() for block in blocks)
        mixing = sum(block.mixer.mixing_flops_per_token(sequence_length) for block in blocks)
        return 6 * weights + mixing
