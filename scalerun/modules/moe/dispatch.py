"""Tokens out to the experts and back, by index: one row for each choice that was kept.

Rows are sorted by expert, and by place within an expert. Nothing of S * E * C elements exists.

S tokens, K choices of a token, N = K * S choices, E experts, R rows, D model width, F any width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from scalerun.modules.moe.router import Routing

ALIGNMENT = 16
"""Bytes that the rows of a grouped product's matrices have to be a multiple of."""
BLOCK_ELEMENTS = {"cpu": 2**18}
"""Elements treated at a time: about a CPU's second-level cache."""


@dataclass(frozen=True)
class Dispatch:
    """Which row each choice is, and which choice each row."""

    rows_KS: Tensor
    """int64; 0 where a choice was dropped."""
    kept_KS: Tensor
    """bool."""
    choices_R: Tensor
    """int64, ``k * S + s``; N in a row that is nobody's."""
    ends_E: Tensor
    """int32: where each expert's rows end."""
    experts_R: Tensor
    """int64."""
    capacity: int
    """No expert has more rows, those that are nobody's aside."""

    @property
    def tokens_R(self) -> Tensor:
        """(R,) int64: the token of each row; the first one in a row that is nobody's."""
        return self.choices_R % self.rows_KS.shape[1]

    def out(self, x_SD: Tensor) -> Tensor:
        """(R, D): each row's token."""
        rows: Tensor = _Out.apply(x_SD, self)
        return rows

    def back(self, y_RD: Tensor, weights_KS: Tensor) -> Tensor:
        """(S, D): each token's rows, weighted and added up; 0 if it has none."""
        total: Tensor = _Back.apply(y_RD, weights_KS.to(y_RD.dtype), self)
        return total

    def spread(self, values_EF: Tensor) -> Tensor:
        """(R, F): each row's expert's values."""
        if is_grouped(values_EF, values_EF.shape[1]):
            rows: Tensor = _Spread.apply(values_EF, self)
            return rows
        return values_EF.index_select(0, self.experts_R)

    def add(self, y_RF: Tensor, values_EF: Tensor) -> Tensor:
        """``y_RF`` itself, with each row's expert's values added."""
        values_EF = values_EF.to(y_RF.dtype)
        if is_grouped(values_EF, values_EF.shape[1]):
            total: Tensor = _Add.apply(y_RF, values_EF, self)
            return total
        return y_RF.add_(values_EF.index_select(0, self.experts_R))

    def multiply(self, x_RF: Tensor, weight_EGF: Tensor) -> Tensor:
        """(R, G): each row times its expert's matrix (G, F), transposed."""
        if is_grouped(x_RF, *weight_EGF.shape[1:]):
            return F.grouped_mm(x_RF, weight_EGF.transpose(1, 2), offs=self.ends_E)
        return self._multiply_padded(x_RF, weight_EGF)

    def _multiply_padded(self, x_RF: Tensor, weight_EGF: Tensor) -> Tensor:
        """The same through a buffer of equally many places for each expert."""
        num_experts = len(self.ends_E)
        starts_E = F.pad(self.ends_E[:-1], (1, 0)).long()
        places_R = torch.arange(len(x_RF), device=x_RF.device) - starts_E[self.experts_R]
        slots_R = self.experts_R * self.capacity + places_R
        nobodys_R = self.choices_R == self.rows_KS.numel()
        num_slots = num_experts * self.capacity
        # Rows that are nobody's share a slot behind the buffer.
        slots_R = slots_R.masked_fill(nobodys_R, num_slots)
        x = x_RF.new_zeros(num_slots + 1, x_RF.shape[1]).index_copy(0, slots_R, x_RF)
        x_ECF = x[:-1].view(num_experts, self.capacity, -1)
        y_ECG = torch.bmm(x_ECF, weight_EGF.transpose(1, 2))
        return y_ECG.flatten(0, 1).index_select(0, slots_R.clamp(max=num_slots - 1))


def is_grouped(x: Tensor, *widths: int) -> bool:
    """Whether torch multiplies matrices of the type of ``x`` group by group.

    On a CPU that is the fastest way and computes nothing in vain. On a GPU torch has a kernel for
    bfloat16; for other types it would wait for the group sizes on the host.

    Args:
        widths: lengths of the matrices' rows, which have to be multiples of 16 bytes.
    """
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    if any(width * dtype.itemsize % ALIGNMENT for width in widths):
        return False
    if x.device.type == "cuda":
        return dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return dtype in (torch.float32, torch.bfloat16)


def make_dispatch(routing: Routing) -> Dispatch:
    """Rows for the choices that were kept.

    On a CPU there are as many rows as kept choices (but at least one). Elsewhere the host does not
    know that number and does not wait for it: there are K * S rows, and the last expert computes on
    those that are nobody's.
    """
    experts_KS, kept_KS = routing.experts_KS, routing.kept_KS
    num_choices, device = kept_KS.numel(), kept_KS.device
    counts_E = torch.zeros(routing.num_experts, dtype=torch.int64, device=device)
    counts_E.scatter_add_(0, experts_KS.flatten(), kept_KS.flatten().long())
    ends_E = counts_E.cumsum(0)
    num_rows = max(int(ends_E[-1]), 1) if device.type == "cpu" else num_choices
    places_KS = (ends_E - counts_E)[experts_KS] + routing.places_KS
    rows_KS = places_KS.masked_fill(~kept_KS, num_rows)
    choices_R = torch.full((num_rows + 1,), num_choices, device=device)
    choices_R.scatter_(0, rows_KS.flatten(), torch.arange(num_choices, device=device))
    choices_R[-1:].fill_(num_choices)
    ends_E[-1:].fill_(num_rows)
    experts_R = torch.searchsorted(ends_E, torch.arange(num_rows, device=device), right=True)
    return Dispatch(
        rows_KS=rows_KS.masked_fill(~kept_KS, 0),
        kept_KS=kept_KS,
        choices_R=choices_R[:-1],
        ends_E=ends_E.to(torch.int32),
        experts_R=experts_R,
        capacity=routing.capacity,
    )


class _Out(torch.autograd.Function):
    """(S, D) -> (R, D). Backward a token gathers its K rows, where torch would scatter them."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return x_SD.index_select(0, dispatch.tokens_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return _sum_rows(grad_RD, ctx.dispatch.kept_KS, ctx.dispatch), None


class _Back(torch.autograd.Function):
    """(R, D) rows and (K, S) weights -> (S, D)."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weights_KS: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        ctx.save_for_backward(y_RD, weights_KS)
        return _sum_rows(y_RD, weights_KS, dispatch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, Tensor, None]:
        y_RD, weights_KS = ctx.saved_tensors
        dispatch: Dispatch = ctx.dispatch
        grad_RD = grad_SD.index_select(0, dispatch.tokens_R)
        of_weights_R = (grad_RD * y_RD).sum(-1)
        of_weights_KS = of_weights_R[dispatch.rows_KS].masked_fill(~dispatch.kept_KS, 0.0)
        weights_R = F.pad(weights_KS.flatten(), (0, 1))[dispatch.choices_R]
        return grad_RD.mul_(weights_R.unsqueeze(1)), of_weights_KS, None


class _Spread(torch.autograd.Function):
    """(E, F) -> (R, F). Backward sums each expert's rows as a product with ones."""

    @staticmethod
    def forward(ctx: Any, values_EF: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return values_EF.index_select(0, dispatch.experts_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, None]:
        return _sum_by_expert(grad_RF, ctx.dispatch), None


class _Add(torch.autograd.Function):
    """(R, F) + (E, F) -> (R, F), in place and a block of rows at a time.

    Spread over all rows the values would be as large as the activations.
    """

    @staticmethod
    def forward(ctx: Any, y_RF: Tensor, values_EF: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        ctx.mark_dirty(y_RF)
        elements = BLOCK_ELEMENTS.get(y_RF.device.type, y_RF.numel())
        step = max(1, elements // y_RF.shape[1])
        for block_RF, experts_R in zip(
            y_RF.split(step), dispatch.experts_R.split(step), strict=True
        ):
            block_RF.add_(values_EF.index_select(0, experts_R))
        return y_RF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad_RF, _sum_by_expert(grad_RF, ctx.dispatch), None


def _sum_by_expert(rows_RF: Tensor, dispatch: Dispatch) -> Tensor:
    """(E, F): each expert's rows added up, as a product with ones."""
    ones = rows_RF.new_ones(len(rows_RF), ALIGNMENT // rows_RF.dtype.itemsize)
    with torch.autocast(rows_RF.device.type, enabled=False):
        return F.grouped_mm(ones.t(), rows_RF.contiguous(), offs=dispatch.ends_E)[:, 0]


def _sum_rows(rows_RD: Tensor, weights_KS: Tensor, dispatch: Dispatch) -> Tensor:
    """(S, D): each token's rows, weighted and added up."""
    weights_KS = weights_KS.to(rows_RD.dtype)
    total = None
    for rows_S, weights_S in zip(dispatch.rows_KS, weights_KS, strict=True):
        part = rows_RD.index_select(0, rows_S).mul_(weights_S.unsqueeze(1))
        total = part if total is None else total.add_(part)
    assert total is not None
    return total
