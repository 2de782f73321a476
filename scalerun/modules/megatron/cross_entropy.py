"""Cross entropy of logits, whole or with a vocabulary that is spread over the ranks of an axis.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3. N rows (tokens), V / P columns: this
rank's part of the vocabulary; all of it without an axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scalerun.distributed.collectives import all_reduce
from scalerun.modules.row_blocks import row_blocks

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


def vocab_parallel_cross_entropy_sum(
    logits: Tensor,
    targets: Tensor,
    mesh: DeviceMesh | None,
    *,
    ignore_index: int,
    overwrite_logits: bool = False,
) -> Tensor:
    """Sum of -log softmax(logits)[target] over the targets that are not ``ignore_index``.

    Ranks exchange three numbers for each row. The softmax is computed in float32 or
    better, a block of rows at a time, forward and again backward.

    Args:
        logits: (..., V / P) floating point, this rank's part.
        targets: (...) int64, numbers in the whole vocabulary; the same on all ranks.
        mesh: axis that the vocabulary is spread over, or None.
        ignore_index: target that costs nothing.
        overwrite_logits: let the backward pass write the gradient over the logits. A second
            backward pass is then an error.

    Returns:
        A scalar, float32 or better, the same on all ranks; 0 when there are no targets.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    result: Tensor = _VocabParallelCrossEntropySum.apply(
        rows, targets.reshape(-1), mesh, ignore_index, overwrite_logits
    )
    return result


def vocab_parallel_loss_and_gradient(
    logits: Tensor,
    targets: Tensor,
    mesh: DeviceMesh | None,
    *,
    ignore_index: int,
    overwrite_logits: bool,
) -> Tensor:
    """The same sum for logits (N, V / P) that no graph follows: float32 or better.

    Args:
        overwrite_logits: put the gradient of the logits in their place.
    """
    index, own = own_columns(targets, logits.shape[1], mesh)
    log_sum, at_target = log_sums(logits, index, own, mesh)
    ignored = targets == ignore_index
    if overwrite_logits:
        scale = (~ignored).to(log_sum.dtype)
        write_gradient(logits, logits, log_sum, index, own=own, scale=scale)
    return (log_sum - at_target).masked_fill_(ignored, 0.0).sum()


class _VocabParallelCrossEntropySum(torch.autograd.Function):
    """(N, V / P) logits and (N,) targets -> scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        mesh: DeviceMesh | None,
        ignore_index: int,
        overwrite_logits: bool,
    ) -> Tensor:
        index, own = own_columns(targets, logits.shape[1], mesh)
        log_sum, at_target = log_sums(logits, index, own, mesh)
        ctx.save_for_backward(logits, targets, log_sum)
        ctx.mesh, ctx.ignore_index, ctx.overwrite = mesh, ignore_index, overwrite_logits
        return (log_sum - at_target).masked_fill_(targets == ignore_index, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets, log_sum = ctx.saved_tensors
        index, own = own_columns(targets, logits.shape[1], ctx.mesh)
        scale = torch.where(targets == ctx.ignore_index, 0.0, grad_output)
        grad = logits if ctx.overwrite else torch.empty_like(logits)
        write_gradient(grad, logits, log_sum, index, own=own, scale=scale)
        return grad, None, None, None, None


def own_columns(
    targets: Tensor, num_columns: int, mesh: DeviceMesh | None
) -> tuple[Tensor, Tensor]:
    """The targets' columns (N, 1), 0 if not on this rank, and whether they are on it (N,)."""
    if mesh is None:
        # What is beyond the vocabulary stays, and is an error.
        return targets.clamp(min=0).unsqueeze(1), targets >= 0
    own = targets - mesh.get_local_rank() * num_columns
    here = (own >= 0) & (own < num_columns)
    return own.where(here, 0).unsqueeze(1), here


def log_sums(
    logits: Tensor, index: Tensor, own: Tensor, mesh: DeviceMesh | None
) -> tuple[Tensor, Tensor]:
    """``log sum exp`` of each row over the whole vocabulary, and the logit of its target: (N,)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_sum = torch.empty(logits.shape[0], dtype=wide, device=logits.device)
    for rows in row_blocks(logits):
        log_sum[rows] = torch.logsumexp(logits[rows].to(wide), 1)
    at_target = logits.gather(1, index).squeeze(1).to(wide).where(own, 0.0)
    if mesh is None:
        return log_sum, at_target
    largest = all_reduce(log_sum, mesh, largest=True)
    sums, at_target = all_reduce(torch.stack(((log_sum - largest).exp_(), at_target)), mesh)
    return sums.log_() + largest, at_target


def write_gradient(
    grad: Tensor,
    logits: Tensor,
    log_sum: Tensor,
    index: Tensor,
    *,
    own: Tensor,
    scale: Tensor,
    weights: tuple[float, float] = (1.0, 0.0),
) -> None:
    """``(softmax - weights) * scale`` of each row, into ``grad``.

    Args:
        weights: of the target alone, and of every symbol.
    """
    at_target, everywhere = weights
    minus_target = -at_target * own.to(log_sum.dtype).unsqueeze(1)
    for rows in row_blocks(logits):
        probs = (logits[rows].to(log_sum.dtype) - log_sum[rows, None]).exp_()
        probs.scatter_add_(1, index[rows], minus_target[rows])
        if everywhere:
            probs -= everywhere
        torch.mul(probs, scale[rows, None], out=grad[rows])
