"""Linear layers and embeddings whose weights are spread over the ranks of a tensor axis.

Source: Shoeybi et al. 2019, arXiv:1909.08053. Parameters have their whole shapes, and each rank
holds a part. Without an axis every layer is the plain one.

B batch, T tokens, D model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from scalerun.distributed.sharding import empty_parameter, part_of
from scalerun.modules.embedding import TokenEmbedding
from scalerun.modules.init import Initializer, LinearInit
from scalerun.modules.linear import Linear
from scalerun.modules.megatron.mappings import copy_to, gather_from, leave, scatter_to

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


class ColumnParallelLinear(Linear):
    """A linear layer of which each rank computes a part of the outputs: it has rows of W and b.

    Args:
        in_features: width of the input, which is whole on each rank.
        out_features: width of the whole output; the axis has to divide it.
        init: how the whole weights start.
        bias: have one.
        tp_mesh: axis that shares the outputs; None for the plain layer.
        gather_output: join the ranks' outputs.
        copy_input: add up the input's gradient over the ranks. False where several layers read
            one input that :func:`scalerun.modules.megatron.mappings.enter` gave.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init: LinearInit,
        bias: bool = True,
        tp_mesh: DeviceMesh | None = None,
        gather_output: bool = False,
        copy_input: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, init=init, bias=bias)
        self.tp_mesh = tp_mesh
        self.gather_output = gather_output
        self.copy_input = copy_input
        if tp_mesh is not None:
            self.weight = empty_parameter((out_features, in_features), mesh=tp_mesh, dim=0)
            if bias:
                self.bias = empty_parameter((out_features,), mesh=tp_mesh, dim=0)

    def forward(self, x: Tensor) -> Tensor:
        """(..., out_features / ranks), or all of them if they are gathered."""
        if self.tp_mesh is None:
            return F.linear(x, self.weight, self.bias)
        if self.copy_input:
            x = copy_to(x, self.tp_mesh)
        bias = None if self.bias is None else part_of(self.bias, self.tp_mesh)
        y = F.linear(x, part_of(self.weight, self.tp_mesh), bias)
        return gather_from(y, self.tp_mesh) if self.gather_output else y


class RowParallelLinear(Linear):
    """A linear layer of which each rank reads a part of the inputs: it has columns of W.

    The ranks' outputs are added, and then the bias, which each rank has whole.

    Args:
        in_features: width of the whole input; the axis has to divide it.
        out_features: width of the output.
        init: how the whole weights start.
        bias: have one.
        tp_mesh: axis that shares the inputs; None for the plain layer.
        input_is_parallel: the input is this rank's part; else it is whole.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init: LinearInit,
        bias: bool = True,
        tp_mesh: DeviceMesh | None = None,
        input_is_parallel: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, init=init, bias=bias)
        self.tp_mesh = tp_mesh
        self.input_is_parallel = input_is_parallel
        if tp_mesh is not None:
            self.weight = empty_parameter((out_features, in_features), mesh=tp_mesh, dim=1)

    def forward(self, x: Tensor, time_mesh: DeviceMesh | None = None) -> Tensor:
        """(..., out_features).

        Args:
            time_mesh: axis to spread the tokens of (B, T, in_features) over; None to have all of
                them on each rank.
        """
        if self.tp_mesh is None:
            return F.linear(x, self.weight, self.bias)
        if not self.input_is_parallel:
            x = scatter_to(x, self.tp_mesh)
        y = F.linear(x, part_of(self.weight, self.tp_mesh))
        y = leave(y, self.tp_mesh, time_mesh)
        if self.bias is None:
            return y
        return y + copy_to(self.bias, time_mesh).to(y.dtype)


class VocabParallelEmbedding(TokenEmbedding):
    """A table of which each rank has neighbouring rows; it looks up those it has.

    Args:
        vocab_size: rows of the whole table; the axis has to divide it.
        dim: D.
        padding_idx: its row gets no gradient from being looked up; None for no such row.
        init: how the whole table starts.
        tp_mesh: axis that shares the rows; None for the plain table.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        padding_idx: int | None,
        init: Initializer,
        tp_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(vocab_size, dim, padding_idx=padding_idx, init=init)
        self.tp_mesh = tp_mesh
        if tp_mesh is not None:
            self.weight = empty_parameter((vocab_size, dim), mesh=tp_mesh, dim=0)

    def forward(self, tokens_BT: Tensor, time_mesh: DeviceMesh | None = None) -> Tensor:
        if self.tp_mesh is None:
            return super().forward(tokens_BT, time_mesh)
        weight = part_of(self.weight, self.tp_mesh)
        rows = weight.shape[0]
        first = self.tp_mesh.get_local_rank() * rows
        own_BT = tokens_BT - first
        foreign_BT = (own_BT < 0) | (own_BT >= rows)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < rows:
            padding = None
        x_BTD = F.embedding(own_BT.masked_fill(foreign_BT, 0), weight, padding)
        return leave(x_BTD.masked_fill(foreign_BT.unsqueeze(-1), 0.0), self.tp_mesh, time_mesh)
