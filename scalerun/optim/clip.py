"""Gradient norm and clipping, for gradients on any mix of devices and meshes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from scalerun.dataclass.errors import ConfigError
from scalerun.distributed.mesh import local_part
from scalerun.modules.moe.experts import is_expert_parameter

NormType = Literal["l2", "inf", "sparse"]

EPSILON = 1e-6
"""Added to the norm before the division, as torch's own clipping does."""


@dataclass(frozen=True)
class GradNorm:
    """A norm of all gradients, and its parts. Float32 scalars, the same on all ranks."""

    total: Tensor
    """The norm that is limited."""
    dense: Tensor
    """Of the parameters that are no expert's."""
    expert: Tensor | None
    """Of the experts' parameters, not weighted; None if there are none."""

    def stats(self) -> dict[str, Tensor]:
        """What to log: ``gnorm``, and for a model with experts its parts."""
        if self.expert is None:
            return {"gnorm": self.total}
        return {"gnorm": self.total, "gnorm_dense": self.dense, "gnorm_expert": self.expert}


def check_norm_type(norm_type: NormType, names: Iterable[str]) -> None:
    """Refuse a norm that says nothing new of parameters with these canonical names.

    Raises:
        ConfigError: it weighs experts, and there are none.
    """
    if norm_type == "sparse" and not any(map(is_expert_parameter, names)):
        raise ConfigError(
            "--clip-norm-type sparse weighs the gradients of experts, and the model has none; give "
            "--clip-norm-type l2, or --moe-freq and --moe-expert-count"
        )


def clip_grad_norm(
    named_params: Mapping[str, nn.Parameter], max_norm: float, norm_type: NormType = "l2"
) -> GradNorm:
    """Scale all gradients so that their norm is at most ``max_norm``; return the norm before.

    Gradients, those of experts included, are multiplied by ``max_norm / (norm + 1e-6)`` when that
    is below 1. With a norm that is not finite they are left as they are.

    Every rank that holds a part of the parameters must call this, with parameters in the same
    order.

    Args:
        named_params: parameters by canonical name.
        max_norm: 0 measures the norm and leaves the gradients alone.
        norm_type: see :func:`grad_norm`.
    """
    norm = grad_norm(named_params, norm_type)
    grads = [param.grad for param in named_params.values() if param.grad is not None]
    if max_norm > 0 and grads:
        coefficient = (max_norm / (norm.total + EPSILON)).clamp(max=1.0)
        coefficient = coefficient.where(norm.total.isfinite(), 1.0)
        if not coefficient.is_cpu or coefficient.item() < 1.0:
            multiply_grads(grads, coefficient)
    return norm


def grad_norm(named_params: Mapping[str, nn.Parameter], norm_type: NormType = "l2") -> GradNorm:
    """The norm of all gradients as one vector, in float32; 0 when there are none.

    DTensors on different meshes cannot meet in one operation, so each mesh is reduced to a plain
    number by itself.

    Args:
        named_params: parameters by canonical name. Those of experts are told by it, and their
            number E by the first dimension.
        norm_type: ``l2``; ``inf`` for the largest absolute value; or ``sparse`` for
            ``sqrt(|dense|^2 + |expert|^2 / E)``, the SparseClip of TorchScale (Ma et al. 2022,
            arXiv:2211.13184). Its released sample scales copies of the experts' gradients, so that
            these are never clipped; here they are.
    """
    groups: dict[tuple[int, Any, tuple[int, ...], torch.device], list[Tensor]] = defaultdict(list)
    for name, param in named_params.items():
        if param.grad is not None:
            num_experts = param.shape[0] if is_expert_parameter(name) else 0
            mesh = getattr(param.grad, "device_mesh", None)
            axes = _sharded_axes(param.grad)
            groups[num_experts, mesh, axes, param.grad.device].append(param.grad)
    dense: list[Tensor] = []
    expert: list[Tensor] = []
    weighted: list[Tensor] = []
    for (num_experts, *_), grads in groups.items():
        norm = _group_norm(grads, norm_type)
        (expert if num_experts else dense).append(norm)
        weighted.append(norm * num_experts**-0.5 if num_experts else norm)
    return GradNorm(
        total=_combined(weighted if norm_type == "sparse" else dense + expert, norm_type),
        dense=_combined(dense, norm_type),
        expert=_combined(expert, norm_type) if expert else None,
    )


def multiply_grads(grads: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors in place by a number or a plain scalar tensor."""
    groups: dict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in grads:
        groups[grad.device].append(local_part(grad))
    for device, group in groups.items():
        torch._foreach_mul_(group, factor.to(device) if isinstance(factor, Tensor) else factor)


def _combined(norms: list[Tensor], norm_type: NormType) -> Tensor:
    """The norm of vectors that have these norms."""
    if not norms:
        return torch.zeros(())
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    return torch.linalg.vector_norm(stacked, _order(norm_type)).float()


def _order(norm_type: NormType) -> float:
    return float("inf") if norm_type == "inf" else 2.0


def _group_norm(grads: list[Tensor], norm_type: NormType) -> Tensor:
    """The norm of tensors that lie on the same axes, as a plain float64 scalar.

    In float64 its float32 value is the same however the tensors are cut.
    """
    order = _order(norm_type)
    norms = torch._foreach_norm([local_part(grad) for grad in grads], order, dtype=torch.float64)
    norm = torch.linalg.vector_norm(torch.stack(norms), order)
    for axis in _sharded_axes(grads[0]):
        group = grads[0].device_mesh.get_group(axis)  # type: ignore[attr-defined]
        if norm_type == "inf":
            torch.distributed.all_reduce(norm, torch.distributed.ReduceOp.MAX, group=group)
        else:
            norm = norm.square()
            torch.distributed.all_reduce(norm, group=group)
            norm = norm.sqrt()
    return norm


def _sharded_axes(grad: Tensor) -> tuple[int, ...]:
    """The axes of a DTensor's mesh whose ranks hold other parts of it; none for a plain tensor."""
    placements = getattr(grad, "placements", ())
    return tuple(axis for axis, placement in enumerate(placements) if not placement.is_replicate())
