"""Gradient norm and clipping, for gradients on any mix of devices and meshes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from scalerun.distributed.mesh import local_part

NormType = Literal["l2", "inf"]

EPSILON = 1e-6
"""Added to the norm before the division, as torch's own clipping does."""


def clip_grad_norm(
    params: Iterable[nn.Parameter], max_norm: float, norm_type: NormType = "l2"
) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; return the norm before.

    The norm is taken in float32 over all gradients as if they were one vector. Gradients are
    multiplied by ``max_norm / (norm + 1e-6)`` when that is below 1. With a norm that is not finite
    the gradients become unusable: look at the returned norm before stepping.

    Every rank that holds a part of the parameters must call this, with parameters in the same
    order.

    Args:
        max_norm: 0 measures the norm and leaves the gradients alone.
        norm_type: ``l2``, or ``inf`` for the largest absolute value.

    Returns:
        A float32 scalar, 0 when there are no gradients.
    """
    grads = [param.grad for param in params if param.grad is not None]
    norm = total_norm(grads, norm_type)
    if max_norm > 0 and grads:
        coefficient = (max_norm / (norm + EPSILON)).clamp(max=1.0)
        if norm.is_cpu and coefficient.item() == 1.0:
            return norm
        multiply_grads(grads, coefficient)
    return norm


def total_norm(grads: Iterable[Tensor], norm_type: NormType = "l2") -> Tensor:
    """The norm of all tensors as one vector: per mesh and device first, then over those.

    DTensors on different meshes cannot meet in one operation, so each mesh is reduced to a plain
    number by itself.
    """
    groups: dict[tuple[Any, torch.device], list[Tensor]] = defaultdict(list)
    for grad in grads:
        groups[getattr(grad, "device_mesh", None), grad.device].append(grad)
    if not groups:
        return torch.zeros(())
    norms = [_group_norm(group, norm_type) for group in groups.values()]
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    return torch.linalg.vector_norm(stacked, _order(norm_type))


def multiply_grads(grads: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors in place by a number or a plain scalar tensor."""
    groups: dict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in grads:
        groups[grad.device].append(local_part(grad))
    for device, group in groups.items():
        torch._foreach_mul_(group, factor.to(device) if isinstance(factor, Tensor) else factor)


def _order(norm_type: NormType) -> float:
    return 2.0 if norm_type == "l2" else float("inf")


def _group_norm(grads: list[Tensor], norm_type: NormType) -> Tensor:
    """The norm of tensors on one mesh and device, as a plain float32 scalar."""
    if any(grad.dtype != torch.float32 for grad in grads):
        norms = [torch.linalg.vector_norm(g, _order(norm_type), dtype=torch.float32) for g in grads]
    else:
        norms = list(torch._foreach_norm(grads, _order(norm_type)))
    norm = torch.linalg.vector_norm(torch.stack(norms), _order(norm_type))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
