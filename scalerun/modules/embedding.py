"""From token numbers to vectors. B batch, T time, D model width, V vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalerun.modules.block_context import NOTHING_KNOWN, BlockContext, spread_over
from scalerun.modules.drop_path import dropout
from scalerun.modules.init import Initializer
from scalerun.modules.megatron.mappings import TIME, scatter_to_sequence
from scalerun.modules.multiway import route
from scalerun.modules.norm import normed
from scalerun.modules.positions.base_position import AbsolutePosition

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


class TokenEmbedding(nn.Module):
    """A table (V, D). The row of ``padding_idx`` gets no gradient from being looked up."""

    tp_mesh: DeviceMesh | None = None
    """Axis that shares its rows."""

    def __init__(
        self, vocab_size: int, dim: int, *, padding_idx: int | None, init: Initializer
    ) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        self.init = init
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def initializers(self) -> dict[str, Initializer]:
        return {"weight": self.init}

    def forward(self, tokens_BT: Tensor, time_mesh: DeviceMesh | None = None) -> Tensor:
        """(B, T, D) from (B, T), or this rank's tokens of it.

        Args:
            time_mesh: axis to spread the tokens over; None to have all of them.
        """
        return scatter_to_sequence(F.embedding(tokens_BT, self.weight, self.padding_idx), time_mesh)


class InputEmbedding(nn.Module):
    """``dropout(norm(scale * token + position))``.

    Args:
        tokens: the token table.
        positions: maps positions (B or 1, T) to vectors, or None.
        norm: applied to the sum, or None.
        scale: factor of the token vectors alone.
        dropout: rate of elements set to 0 in training.
    """

    def __init__(
        self,
        tokens: TokenEmbedding,
        positions: AbsolutePosition | None,
        *,
        norm: nn.Module | None = None,
        scale: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.norm = norm
        self.scale = scale
        self.dropout = dropout

    def forward(
        self, tokens_BT: Tensor, positions_BT: Tensor, *, time_mesh: DeviceMesh | None = None
    ) -> Tensor:
        vectors_BTD = self.tokens(tokens_BT, time_mesh)
        return self.place(vectors_BTD, positions_BT, context=spread_over(time_mesh))

    def place(
        self, vectors_BTD: Tensor, positions_BT: Tensor, *, context: BlockContext = NOTHING_KNOWN
    ) -> Tensor:
        """The first layer's input from token vectors that were made elsewhere.

        Args:
            vectors_BTD: of all tokens, or of this rank's.
            positions_BT: of all tokens.
            context: says where multiway layers split the sequence, and whether tokens are spread.
        """
        x_BTD = self.scale * vectors_BTD if self.scale != 1.0 else vectors_BTD
        if self.positions is not None:
            places_BTD = route(self.positions, positions_BT, context).to(x_BTD.dtype)
            x_BTD = x_BTD + scatter_to_sequence(places_BTD, context.time_mesh)
        if self.norm is not None:
            x_BTD = normed(self.norm, x_BTD, context)
        return dropout(
            x_BTD, self.dropout, training=self.training, mesh=context.time_mesh, dim=TIME
        )

    def num_positions(self) -> int | None:
        """Positions that the table of positions has; None for no limit."""
        return self.positions.limit if self.positions is not None else None
