"""The two kinds of position schemes: added to the embedding, or handed to a mixer.

B batch (or 1 when all rows agree), T queries, S keys, H heads, K width of a head, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


@dataclass(frozen=True)
class Rotation:
    """Turns neighbouring pairs of features of queries and keys."""

    queries: Tensor
    """Float32, (B or 1, 1, T, K / 2, 2): cosine and sine, times a length factor if any."""
    keys: Tensor
    """The same for keys."""

    def __call__(self, q_BHTK: Tensor, k_BHTK: Tensor) -> tuple[Tensor, Tensor]:
        return turn(q_BHTK, self.queries), turn(k_BHTK, self.keys)


def turn(x_BHTK: Tensor, table: Tensor) -> Tensor:
    """Turn pair ``(x[2i], x[2i+1])`` by the cosine and sine of column i, in float32 or better."""
    wide = x_BHTK if x_BHTK.dtype in (torch.float32, torch.float64) else x_BHTK.float()
    pairs = wide.view(*x_BHTK.shape[:-1], -1, 2)
    if torch.compiler.is_compiling():
        # The compiler fuses this and has no code for complex numbers.
        (even, odd), (cos, sin) = pairs.unbind(-1), table.unbind(-1)
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    else:
        # The same numbers at a third of the time.
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table))
    turned = turned.flatten(-2)
    return turned if wide is x_BHTK else turned.to(x_BHTK.dtype)


class AbsolutePosition(nn.Module, ABC):
    """A vector for each position, added to the embedding: (B, T) int64 -> (B, T, D)."""

    limit: int | None
    """Number of positions there are vectors for; None for no limit."""

    @abstractmethod
    def forward(self, positions_BT: Tensor) -> Tensor: ...


class BasePosition(nn.Module):
    """A relative position scheme: it turns queries and keys, or adds to the scores, or neither.

    Only differences of positions matter, so positions count real tokens of the whole sequence;
    restarting them at documents changes nothing inside a document.
    """

    tp_mesh: DeviceMesh | None = None
    """Axis that the heads of :meth:`bias` are spread over."""

    def rotation(self, positions_BT: Tensor, *, center: int) -> Rotation | None:
        """Tables for queries and keys that stand at ``positions_BT``.

        Args:
            positions_BT: (B or 1, T) int64.
            center: the position where length factors are 1: about the middle of all positions,
                the same in every call whose queries meet these keys.
        """
        return None

    def bias(self, query_BT: Tensor, key_BS: Tensor) -> Tensor | None:
        """What is added to the scores: (B or 1, H, T, S)."""
        return None


def positions_after_left_padding(
    padding_BT: Tensor | None, num_tokens: int, device: torch.device
) -> Tensor:
    """(B or 1, T): the places of tokens in their sequence, whose first real token stands at 0."""
    index_1T = torch.arange(num_tokens, device=device).unsqueeze(0)
    if padding_BT is None:
        return index_1T
    num_left_B1 = padding_BT.long().cumprod(1).sum(1, keepdim=True)
    return (index_1T - num_left_B1).clamp_min(0)
