"""Dropout and stochastic depth. At rate 0 and in evaluation both return their input itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from scalerun.modules.megatron.random import spread_dropout

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


def dropout(
    x: Tensor,
    rate: float,
    *,
    training: bool,
    mesh: DeviceMesh | None = None,
    dim: int = -1,
) -> Tensor:
    """Set each element to 0 with probability ``rate`` and scale the rest by ``1 / (1 - rate)``.

    Args:
        mesh: axis that dimension ``dim`` is spread over; the elements set to 0 are those that would
            be without one.
    """
    if not training or rate == 0.0:
        return x
    return F.dropout(x, rate) if mesh is None else spread_dropout(x, rate, mesh, dim)


def drop_path(x: Tensor, rate: float, *, training: bool) -> Tensor:
    """Set a whole sample (dimension 0) to 0 with probability ``rate``; scale the others.

    Source: Huang et al. 2016, arXiv:1603.09382.
    """
    if not training or rate == 0.0:
        return x
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    keep = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1.0 - rate)
    return x * keep.div_(1.0 - rate)


def drop_path_rate_of_layer(rate: float, *, layer: int, num_layers: int) -> float:
    """The rate grows linearly from 0 in the first layer to ``rate`` in the last; 0 if only one."""
    return rate * layer / (num_layers - 1) if num_layers > 1 else 0.0
