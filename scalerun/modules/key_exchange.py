"""Keys and values that ranks lend each other, where each has a slice of every sequence.

B batch, H heads, M kept tokens of a slice, S = M * lenders, K width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scalerun.distributed.collectives import all_to_all_rows

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


class KeyExchange:
    """Which ranks lend this one their keys of a segment, and which ones borrow its own.

    Every rank of the axis has to make the same calls, also one that neither lends nor borrows.

    Args:
        mesh: the axis. Its ranks have slices of equal length, in their order.
        ranks_per_segment: neighbouring ranks that a segment covers, counted from the first rank.
        causal: only keys of earlier ranks are borrowed.
    """

    def __init__(self, mesh: DeviceMesh, *, ranks_per_segment: int, causal: bool) -> None:
        self.mesh = mesh
        num_ranks, own = mesh.size(), mesh.get_local_rank()
        first = own - own % ranks_per_segment
        segment = range(first, min(first + ranks_per_segment, num_ranks))
        earlier, later = range(first, own), range(own + 1, segment.stop)
        self.lenders = [*earlier] if causal else [*earlier, *later]
        self.borrowers = [*later] if causal else [*earlier, *later]

    def borrow(self, k_BHMK: Tensor, v_BHMK: Tensor) -> tuple[Tensor, Tensor] | None:
        """Keys and values of all lenders, each (B, H, S, K); None where there is no lender.

        Args:
            k_BHMK: what this rank lends.
            v_BHMK: the same.
        """
        batch = k_BHMK.shape[0]
        own_BHMX = torch.cat((k_BHMK, v_BHMK), -1)
        rows = own_BHMX.repeat(len(self.borrowers), 1, 1, 1)
        rows = self._send(rows, batch, self.borrowers, self.lenders)
        if not self.lenders:
            return None
        lent_BHSX = rows.unflatten(0, (-1, batch)).permute(1, 2, 0, 3, 4).flatten(2, 3)
        k_BHSK, v_BHSK = lent_BHSX.split((k_BHMK.shape[-1], v_BHMK.shape[-1]), -1)
        return k_BHSK, v_BHSK

    def give_back(
        self,
        own: tuple[Tensor, Tensor],
        borrowed: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """The gradients of this rank's keys and values (B, H, M, K), those of borrowers included.

        Args:
            own: from this rank's queries, each (B, H, M, K).
            borrowed: gradients of what :meth:`borrow` returned.
        """
        own_BHMX = torch.cat(own, -1)
        batch = own_BHMX.shape[0]
        rows = own_BHMX[:0]
        if borrowed is not None:
            parts_BHLMX = torch.cat(borrowed, -1).unflatten(2, (len(self.lenders), -1))
            rows = parts_BHLMX.permute(2, 0, 1, 3, 4).flatten(0, 1)
        rows = self._send(rows, batch, self.lenders, self.borrowers)
        if self.borrowers:
            own_BHMX = torch.cat((own_BHMX, rows)).unflatten(0, (-1, batch)).sum(0)
        k_BHMK, v_BHMK = own_BHMX.split((own[0].shape[-1], own[1].shape[-1]), -1)
        return k_BHMK, v_BHMK

    def _send(self, rows: Tensor, batch: int, to: Sequence[int], by: Sequence[int]) -> Tensor:
        ranks = range(self.mesh.size())
        sent = [batch if rank in to else 0 for rank in ranks]
        received = [batch if rank in by else 0 for rank in ranks]
        return all_to_all_rows(rows, self.mesh, sent=sent, received=received)
