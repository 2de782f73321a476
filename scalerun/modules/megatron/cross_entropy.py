"""Cross entropy of logits whose vocabulary is spread over the ranks of an axis.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3. N rows (tokens), V / P columns: this
rank's part of the vocabulary.
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
    mesh: DeviceMesh,
    *,
    ignore_index: int,
    overwrite_logits: bool = False,
) -> Tensor:
    """Sum of -log softmax(logits)[target] over the targets that are not ``ignore_index``.

    The ranks exchange three numbers for each row. The softmax is computed in float32, a block of
    rows at a time, forward and again backward.

    Args:
        logits: (..., V / P) floating point, this rank's part.
        targets: (...) int64, numbers in the whole vocabulary; the same on all ranks.
        mesh: axis that the vocabulary is spread over.
        ignore_index: target that costs nothing.
        overwrite_logits: let the backward pass write the gradient over the logits. A second
            backward pass is then an error.

    Returns:
        A float32 scalar, the same on all ranks; 0 when there are no targets.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    result: Tensor = _VocabParallelCrossEntropySum.apply(
        rows, targets.reshape(-1), mesh, ignore_index, overwrite_logits
    )
    return result


class _VocabParallelCrossEntropySum(torch.autograd.Function):
    """(N, V / P) logits and (N,) targets -> scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        mesh: DeviceMesh,
        ignore_index: int,
        overwrite_logits: bool,
    ) -> Tensor:
        index, own = _own_columns(targets, logits.shape[1], mesh)
        largest = all_reduce(logits.amax(1).float(), mesh, largest=True)
        sums = torch.empty_like(largest)
        for rows in row_blocks(logits):
            sums[rows] = (logits[rows].float() - largest[rows, None]).exp_().sum(1)
        at_target = logits.gather(1, index).squeeze(1).float() - largest
        sums, at_target = all_reduce(torch.stack((sums, at_target.where(own, 0.0))), mesh)
        log_sum = sums.log_()
        ctx.save_for_backward(logits, targets, log_sum + largest)
        ctx.mesh, ctx.ignore_index, ctx.overwrite = mesh, ignore_index, overwrite_logits
        return (log_sum - at_target).masked_fill_(targets == ignore_index, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets, log_sum = ctx.saved_tensors
        index, own = _own_columns(targets, logits.shape[1], ctx.mesh)
        scale = torch.where(targets == ctx.ignore_index, 0.0, grad_output).unsqueeze(1)
        minus_one = -own.float().unsqueeze(1)
        grad = logits if ctx.overwrite else torch.empty_like(logits)
        for rows in row_blocks(logits):
            probs = (logits[rows].float() - log_sum[rows, None]).exp_()
            probs.scatter_add_(1, index[rows], minus_one[rows])
            torch.mul(probs, scale[rows], out=grad[rows])
        return grad, None, None, None, None


def _own_columns(targets: Tensor, num_columns: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """The targets' columns (N, 1), 0 if not on this rank, and whether they are on it."""
    own = targets - mesh.get_local_rank() * num_columns
    here = (own >= 0) & (own < num_columns)
    return own.where(here, 0).unsqueeze(1), here
