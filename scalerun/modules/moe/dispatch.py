"""Tokens out to the experts and back, by index: a row for each choice that was kept.

Rows are sorted by expert, and by place within an expert. Nothing of S * E * C elements exists.

S tokens, K choices of a token, N = K * S choices, E experts, C places of an expert, R rows, D model
width, F and G any widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from scalerun.modules.linear import product_dtype
from scalerun.modules.moe.router import Choices

ALIGNMENT = 16
"""Bytes that the rows of a grouped product's matrices have to be a multiple of."""
FEW_ROWS = 64
"""With so few rows an expert's product is bound by reading its weights: empty places are free."""
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
    """int64, ``k * S + s``; N in a row that is nobody's: it is computed in vain."""
    experts_R: Tensor
    """int64."""
    ends_E: Tensor
    """int32: where each expert's rows end."""
    places: int | None
    """Rows of an expert where all have equally many, else None."""

    @property
    def tokens_R(self) -> Tensor:
        """(R,) int64: the token of each row; the first one in a row that is nobody's."""
        return self.choices_R % self.rows_KS.shape[1]

    def of_rows(self, values_KSD: Tensor) -> Tensor:
        """(R, D): what belongs to each row's choice; any choice's in a row that is nobody's."""
        values_ND = values_KSD.flatten(0, 1)
        return values_ND.index_select(0, self.choices_R.clamp_max(len(values_ND) - 1))

    def out(self, x_SD: Tensor) -> Tensor:
        """(R, D): each row's token."""
        rows: Tensor = _Out.apply(x_SD, self)
        return rows

    def back(self, y_RD: Tensor, weights_KS: Tensor, mask_KSD: Tensor | None = None) -> Tensor:
        """(S, D): each token's rows, weighted and added up; 0 if it has none.

        Args:
            mask_KSD: factors of the rows, by choice and token; None for 1.
        """
        if mask_KSD is not None:
            y_RD = y_RD * self.of_rows(mask_KSD)
        total: Tensor = _Back.apply(y_RD, weights_KS.to(y_RD.dtype), self)
        return total

    def sum(self, y_RD: Tensor) -> Tensor:
        """(S, D): each token's rows, added up; 0 if it has none."""
        total: Tensor = _Sum.apply(y_RD, self)
        return total

    def spread(self, values_EF: Tensor) -> Tensor:
        """(R, F): each row's expert's values."""
        rows: Tensor = _Spread.apply(values_EF, self)
        return rows

    def add(self, y_RF: Tensor, values_EF: Tensor) -> Tensor:
        """``y_RF`` itself, with each row's expert's values added."""
        total: Tensor = _Add.apply(y_RF, values_EF.to(y_RF.dtype), self)
        return total

    def multiply(self, x_RF: Tensor, weight_EGF: Tensor) -> Tensor:
        """(R, G): each row times its expert's matrix (G, F), transposed."""
        if self.places is None:
            return F.grouped_mm(x_RF, weight_EGF.transpose(1, 2), offs=self.ends_E)
        dtype = product_dtype(x_RF)
        x_ECF = x_RF.to(dtype).view(len(weight_EGF), self.places, -1)
        y_ECG: Tensor = _BatchedProduct.apply(x_ECF, weight_EGF.to(dtype))
        return y_ECG.flatten(0, 1)


def has_grouped_products(x: Tensor, *widths: int) -> bool:
    """Whether torch multiplies matrices of the type of ``x`` group by group, and fast.

    On a CPU that computes nothing in vain. On a GPU torch has a kernel for bfloat16; for other
    types it would wait for the group sizes on the host.

    Args:
        widths: lengths of the matrices' rows, which have to be multiples of 16 bytes.
    """
    dtype = product_dtype(x)
    if any(width * dtype.itemsize % ALIGNMENT for width in widths):
        return False
    if x.device.type == "cuda":
        return dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return dtype in (torch.float32, torch.bfloat16)


def make_dispatch(choices: Choices, *, grouped: bool) -> Dispatch:
    """Rows for the choices that were kept.

    With grouped products an expert has as many rows as it needs. Elsewhere than on a CPU the host
    does not wait for their number: there are N rows, and the last expert has those that are
    nobody's. Without, and where an expert has few places, all have equally many rows.

    Args:
        choices: where the tokens go.
        grouped: whether grouped products can be had.
    """
    num_choices, places = choices.kept_KS.numel(), choices.capacity
    on_host = choices.kept_KS.device.type == "cpu"
    counts_E = choices.counts_E()
    if grouped and places > FEW_ROWS:
        num_rows = max(int(counts_E.sum()), 1) if on_host else num_choices
        return packed_dispatch(choices, counts_E, num_rows)
    if on_host or places * choices.num_experts > 2 * num_choices:
        # Waiting for the largest count is worth its while where most places are empty.
        places = min(places, int(counts_E.max()))
    places = max(places, 1)
    starts_E = torch.arange(choices.num_experts, device=counts_E.device) * places
    num_rows = places * choices.num_experts
    return _arranged(choices, starts_E, starts_E + places, num_rows, places=places)


def packed_dispatch(choices: Choices, counts_E: Tensor, num_rows: int) -> Dispatch:
    """As many rows for an expert as it needs; those that are nobody's are the last expert's.

    Args:
        counts_E: kept choices of each expert.
        num_rows: 1 or more, and no fewer than there are kept choices.
    """
    ends_E = counts_E.cumsum(0)
    starts_E = ends_E - counts_E
    ends_E[-1:].fill_(num_rows)
    return _arranged(choices, starts_E, ends_E, num_rows, places=None)


def _arranged(
    choices: Choices, starts_E: Tensor, ends_E: Tensor, num_rows: int, *, places: int | None
) -> Dispatch:
    kept_KS, device = choices.kept_KS, choices.kept_KS.device
    num_choices = kept_KS.numel()
    rows_KS = starts_E[choices.experts_KS] + choices.places_KS
    rows_KS = rows_KS.masked_fill(~kept_KS, num_rows)
    choices_R = torch.full((num_rows + 1,), num_choices, device=device)
    choices_R.scatter_(0, rows_KS.flatten(), torch.arange(num_choices, device=device))
    choices_R[-1:].fill_(num_choices)
    return Dispatch(
        rows_KS=rows_KS.masked_fill(~kept_KS, 0),
        kept_KS=kept_KS,
        choices_R=choices_R[:-1],
        experts_R=torch.searchsorted(ends_E, torch.arange(num_rows, device=device), right=True),
        ends_E=ends_E.to(torch.int32),
        places=places,
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


class _Sum(torch.autograd.Function):
    """(R, D) rows -> (S, D): what :class:`_Out` does backward."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return _sum_rows(y_RD, dispatch.kept_KS, dispatch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None]:
        dispatch: Dispatch = ctx.dispatch
        nobodys_R1 = (dispatch.choices_R == dispatch.kept_KS.numel()).unsqueeze(1)
        return grad_SD.index_select(0, dispatch.tokens_R).masked_fill_(nobodys_R1, 0.0), None


class _BatchedProduct(torch.autograd.Function):
    """(E, C, F) times (E, G, F), transposed. The gradient of the weights is laid out as they are.

    torch's own would be transposed, and copied before it is kept.
    """

    @staticmethod
    def forward(ctx: Any, x_ECF: Tensor, weight_EGF: Tensor) -> Tensor:
        ctx.save_for_backward(x_ECF, weight_EGF)
        return torch.bmm(x_ECF, weight_EGF.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ECG: Tensor) -> tuple[Tensor, Tensor]:
        x_ECF, weight_EGF = ctx.saved_tensors
        of_weight_EGF = torch.bmm(grad_ECG.transpose(1, 2), x_ECF)
        return torch.bmm(grad_ECG, weight_EGF), of_weight_EGF


class _Spread(torch.autograd.Function):
    """(E, F) -> (R, F)."""

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
        if dispatch.places is not None:
            y_RF.view(len(values_EF), dispatch.places, -1).add_(values_EF.unsqueeze(1))
            return y_RF
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
    """(E, F): each expert's rows added up; by a product with ones where their numbers differ."""
    if dispatch.places is not None:
        return rows_RF.reshape(-1, dispatch.places, rows_RF.shape[1]).sum(1)
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
