"""Cross entropy against targets that share some of their weight with the whole vocabulary.

Source: Szegedy et al. 2016, arXiv:1512.00567, section 7, with the shares of fairseq. N rows
(tokens), V symbols, V / P columns: this rank's part of them; all of them without an axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scalerun.distributed.collectives import all_reduce
from scalerun.modules.megatron.cross_entropy import log_sums, own_columns, write_gradient
from scalerun.modules.row_blocks import row_blocks

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


def smoothed_cross_entropy_sums(
    logits: Tensor,
    targets: Tensor,
    mesh: DeviceMesh | None,
    *,
    smoothing: float,
    ignore_index: int,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """The smoothed loss and the plain one, each summed over the targets.

    With e for the smoothing and e' = e / (V - 1), a target y costs
    ``(1 - e - e') * -log p(y) + e' * sum over all V symbols of -log p``. V counts the symbols that
    only fill up the vocabulary too.

    Args:
        logits: (..., V / P) floating point, this rank's part.
        targets: (...) int64, numbers in the whole vocabulary; the same on all ranks.
        mesh: axis that the vocabulary is spread over, or None.
        smoothing: e, from 0 to below 1.
        ignore_index: target that costs nothing.
        overwrite_logits: let the backward pass write the gradient over the logits. A second
            backward pass is then an error.

    Returns:
        Two scalars, float32 or better, the same on all ranks; only the first has a gradient.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    result: tuple[Tensor, Tensor] = _SmoothedCrossEntropySums.apply(
        rows, targets.reshape(-1), mesh, smoothing, ignore_index, overwrite_logits
    )
    return result


class _SmoothedCrossEntropySums(torch.autograd.Function):
    """(N, V / P) logits and (N,) targets -> two scalars.

    The weights of a row's targets add up to 1, so the loss is ``log sum exp`` minus the weighted
    logits, and its gradient the softmax minus the weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        mesh: DeviceMesh | None,
        smoothing: float,
        ignore_index: int,
        overwrite_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        num_symbols = logits.shape[1] * (1 if mesh is None else mesh.size())
        share = smoothing / (num_symbols - 1)
        index, own = own_columns(targets, logits.shape[1], mesh)
        log_sum, at_target = log_sums(logits, index, own, mesh)
        smoothed = log_sum - (1 - smoothing - share) * at_target - share * _row_sums(logits, mesh)
        ctx.save_for_backward(logits, targets, log_sum)
        ctx.mesh, ctx.ignore_index, ctx.overwrite = mesh, ignore_index, overwrite_logits
        ctx.weights = (1 - smoothing - share, share)
        ignored = targets == ignore_index
        plain = (log_sum - at_target).masked_fill_(ignored, 0.0).sum()
        ctx.mark_non_differentiable(plain)
        return smoothed.masked_fill_(ignored, 0.0).sum(), plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, log_sum = ctx.saved_tensors
        index, own = own_columns(targets, logits.shape[1], ctx.mesh)
        scale = torch.where(targets == ctx.ignore_index, 0.0, grad_output)
        grad = logits if ctx.overwrite else torch.empty_like(logits)
        write_gradient(grad, logits, log_sum, index, own=own, scale=scale, weights=ctx.weights)
        return grad, None, None, None, None, None


def _row_sums(logits: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """(N,) sum of each row over the whole vocabulary, float32 or better."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    sums = torch.empty(logits.shape[0], dtype=wide, device=logits.device)
    for rows in row_blocks(logits):
        sums[rows] = logits[rows].sum(1, dtype=wide)
    return sums if mesh is None else all_reduce(sums, mesh)
