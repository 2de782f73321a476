"""Linear layers that read the same input, multiplied as one.

Parameters stay apart, with names, starting values and gradients of their own. They only lie one
behind the other in memory, so that one tensor can show them all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from scalerun.modules.linear import Linear
from scalerun.modules.megatron.layers import ColumnParallelLinear

PLAIN = (Linear, ColumnParallelLinear)
"""Layers that are a product; on a tensor axis their parameters have no plain memory."""


@torch.no_grad()
def lay_together(layers: Sequence[nn.Module]) -> None:
    """Move the weights of plain linear layers into one piece of memory, and the biases too.

    Other layers are left alone, and so are parameters without memory of their own: those on the
    meta device, and sharded ones.
    """
    for parameters in _parameters(layers):
        if _view_of_all(parameters) is None:
            together = torch.cat([parameter.data for parameter in parameters])
            places = together.split([len(parameter) for parameter in parameters])
            for parameter, place in zip(parameters, places, strict=True):
                parameter.data = place


@torch.no_grad()
def joined(layers: Sequence[nn.Module]) -> tuple[Tensor, Tensor] | None:
    """Weight and bias of one layer that does the work of all; None if they do not lie together.

    Both are views: they show what is written into the parameters later, and take no memory. They
    get no gradient.
    """
    views = [_view_of_all(parameters) for parameters in _parameters(layers)]
    if not views or views[0] is None or views[1] is None:
        return None
    return views[0], views[1]


def _parameters(layers: Sequence[nn.Module]) -> list[list[Tensor]]:
    """The weights and the biases; nothing unless all layers are plain, with memory of their own."""
    # A subclass, or what a library puts in a layer's place, may compute something else.
    if any(type(layer) not in PLAIN or layer.bias is None for layer in layers):
        return []
    found = [[getattr(layer, name) for layer in layers] for name in ("weight", "bias")]
    every = [parameter for parameters in found for parameter in parameters]
    if any(type(parameter.data) is not Tensor or parameter.is_meta for parameter in every):
        return []
    return found


def _view_of_all(parameters: Sequence[Tensor]) -> Tensor | None:
    """The tensors along their first dimension, if they fill one piece of memory in this order."""
    first = parameters[0]
    storage, place = first.untyped_storage(), first.data_ptr()
    for parameter in parameters:
        adjoins = parameter.data_ptr() == place and parameter.is_contiguous()
        if not adjoins or parameter.untyped_storage().data_ptr() != storage.data_ptr():
            return None
        place += parameter.nbytes
    rows = sum(len(parameter) for parameter in parameters)
    return first.data.as_strided((rows, *first.shape[1:]), first.stride())
