"""Experts that are spread over ranks: tokens go to the rank that holds theirs, and come back.

Each rank routes its own tokens by itself; what an expert's places are and how evenly the experts
are used is a matter of one rank's tokens. Only the rows of choices that found a place travel.

W ranks, E experts, L = E / W of them on each rank, S tokens, K choices of a token, R rows that a
rank sends, Q rows that it receives, P rows sorted by its experts, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from scalerun.distributed.collectives import all_to_all, all_to_all_rows
from scalerun.modules.linear import product_dtype
from scalerun.modules.moe.dispatch import Dispatch, make_dispatch, packed_dispatch
from scalerun.modules.moe.router import Choices

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


@dataclass(frozen=True)
class Exchange(Dispatch):
    """A dispatch of the Q rows that all ranks send here, one choice for each."""

    outgoing: Dispatch
    """Of this rank's tokens: R rows sorted by expert, and thereby by rank."""
    sent_W: list[int]
    received_W: list[int]
    mesh: DeviceMesh

    def out(self, x_SD: Tensor) -> Tensor:
        """(P, D): the tokens of all ranks that go to the experts of this one."""
        # The experts would round the rows anyway: here it halves what is sent.
        rows_RD = self.outgoing.out(x_SD.to(product_dtype(x_SD)))
        rows_QD = all_to_all_rows(rows_RD, self.mesh, sent=self.sent_W, received=self.received_W)
        if not sum(self.received_W):
            # The experts compute in vain, so that their gradients are zeros and not missing.
            rows_QD = F.pad(rows_QD, (0, 0, 0, 1))
        return super().out(rows_QD)

    def back(self, y_PD: Tensor, weights_KS: Tensor, mask_KSD: Tensor | None = None) -> Tensor:
        """(S, D): each of this rank's tokens' rows, weighted and added up; 0 if it has none."""
        rows_QD = self.sum(y_PD)[: sum(self.received_W)]
        rows_RD = all_to_all_rows(rows_QD, self.mesh, sent=self.received_W, received=self.sent_W)
        return self.outgoing.back(rows_RD, weights_KS, mask_KSD)


def make_exchange(choices: Choices, mesh: DeviceMesh, *, grouped: bool) -> Exchange:
    """Rows for the choices of all ranks. All ranks of the mesh call it.

    The host waits once, for the numbers of rows that go from rank to rank.

    Args:
        choices: where this rank's tokens go. A rank without any sends one row that is nobody's.
        mesh: the ranks that share the experts, an equal number of neighbours on each.
        grouped: whether grouped products can be had.
    """
    counts_E = choices.counts_E()
    rows_E = counts_E.clone()
    rows_E[-1] += counts_E.sum() == 0
    sent_WL = rows_E.view(mesh.size(), -1)
    received_WL = all_to_all(sent_WL, mesh)
    sent, received = torch.stack((sent_WL, received_WL)).tolist()  # the host waits here
    sent_W, received_W = [sum(row) for row in sent], [sum(row) for row in received]
    outgoing = packed_dispatch(choices, counts_E, sum(sent_W))
    largest = max(sum(column) for column in zip(*received, strict=True))
    incoming = _choices_of_rows(received_WL, num_rows=sum(received_W), capacity=largest)
    return Exchange(
        **vars(make_dispatch(incoming, grouped=grouped)),
        outgoing=outgoing,
        sent_W=sent_W,
        received_W=received_W,
        mesh=mesh,
    )


def _choices_of_rows(received_WL: Tensor, *, num_rows: int, capacity: int) -> Choices:
    """The experts of rows that arrive sorted by sender, then by expert, then by place.

    Where none arrives there is one row, which no expert keeps.
    """
    device = received_WL.device
    num_ranks, num_experts = received_WL.shape
    if num_rows == 0:
        nothing_KS = torch.zeros(1, 1, dtype=torch.int64, device=device)
        return Choices(nothing_KS, nothing_KS.bool(), nothing_KS, capacity, num_experts)
    counts_N = received_WL.flatten()
    from_earlier_ranks_N = (received_WL.cumsum(0) - received_WL).flatten()
    first_rows_N = counts_N.cumsum(0) - counts_N
    experts_N = torch.arange(num_experts, device=device).repeat(num_ranks)

    def for_each_row(values_N: Tensor) -> Tensor:
        return values_N.repeat_interleave(counts_N, output_size=num_rows)

    places_Q = torch.arange(num_rows, device=device)
    places_Q = places_Q + for_each_row(from_earlier_ranks_N - first_rows_N)
    experts_Q = for_each_row(experts_N)
    return Choices(
        experts_KS=experts_Q.unsqueeze(0),
        kept_KS=torch.ones_like(experts_Q, dtype=torch.bool).unsqueeze(0),
        places_KS=places_Q.unsqueeze(0),
        capacity=capacity,
        num_experts=num_experts,
    )
