"""Projection to the vocabulary and cross entropy in one, without all logits at once.

N rows (tokens), C rows of a chunk, D features, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scalerun.data.batch import IGNORE_INDEX
from scalerun.modules.linear import product_dtype
from scalerun.modules.megatron.cross_entropy import vocab_parallel_loss_and_gradient

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


def linear_cross_entropy_sum(
    features: Tensor,
    weight_VD: Tensor,
    targets: Tensor,
    *,
    chunk_tokens: int,
    vocab_mesh: DeviceMesh | None = None,
) -> Tensor:
    """Sum of -log softmax(features W^T)[target] over the targets that are not ``IGNORE_INDEX``.

    The gradients of a chunk are computed right after its logits, before those give way to the next
    chunk's: three products, as many as without chunks, where computing the logits again in the
    backward pass would make four. What waits for the backward pass is the gradient of the features
    and of the weight; there they are multiplied by the incoming gradient in place, so a second
    backward pass is an error.

    The softmax is computed in float32 or better, the products in autocast's type, and the gradient
    of the weight is added up over the chunks in float32 or better.

    Args:
        features: (..., D) floating point.
        weight_VD: (V, D), or this rank's rows of it.
        targets: (...) int64.
        chunk_tokens: C, rows whose logits exist at a time.
        vocab_mesh: axis that V is spread over, or None. The gradient of the features is then this
            rank's share of a sum over the ranks.

    Returns:
        A scalar, float32 or better; 0 when there are no targets.
    """
    rows_ND = features.reshape(-1, features.shape[-1])
    wanted = torch.is_grad_enabled()
    result: Tensor = _LinearCrossEntropySum.apply(
        rows_ND, weight_VD, targets.reshape(-1), chunk_tokens, wanted, vocab_mesh
    )
    return result


class _LinearCrossEntropySum(torch.autograd.Function):
    """(N, D) features, (V, D) weight and (N,) targets -> scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        chunk: int,
        wanted: bool,
        mesh: DeviceMesh | None,
    ) -> Tensor:
        device, dtype = x_ND.device, product_dtype(x_ND)
        wide = torch.promote_types(dtype, torch.float32)
        of_x, of_weight = (wanted and need for need in ctx.needs_input_grad[:2])
        w_VD = weight_VD.to(dtype)
        grad_ND = torch.empty_like(x_ND, dtype=dtype) if of_x else None
        grad_VD = torch.zeros_like(weight_VD, dtype=wide) if of_weight else None
        loss = torch.zeros((), dtype=wide, device=device)
        # One for all chunks: else the last chunk's would still be there while the next are made.
        space_CV = x_ND.new_empty((min(chunk, len(x_ND)), len(w_VD)), dtype=dtype)
        with torch.autocast(device.type, enabled=False):
            for start in range(0, len(x_ND), chunk):
                rows = slice(start, start + chunk)
                x_CD = x_ND[rows].to(dtype)
                logits_CV = torch.mm(x_CD, w_VD.t(), out=space_CV[: len(x_CD)])
                loss += vocab_parallel_loss_and_gradient(
                    logits_CV,
                    targets_N[rows],
                    mesh,
                    ignore_index=IGNORE_INDEX,
                    overwrite_logits=of_x or of_weight,
                )
                if grad_ND is not None:
                    torch.mm(logits_CV, w_VD, out=grad_ND[rows])
                if grad_VD is not None:
                    _add_product(grad_VD, logits_CV.t(), x_CD)
        ctx.save_for_backward(
            None if grad_ND is None else grad_ND.to(x_ND.dtype),
            None if grad_VD is None else grad_VD.to(weight_VD.dtype),
        )
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight = (
            None if grad is None else grad.mul_(grad_output) for grad in ctx.saved_tensors
        )
        return of_x, of_weight, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to a total of the same or a wider type."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
