"""The experts of a layer, as stacks of weights.

E experts, R rows of tokens sorted by expert, D model width, F inner width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalerun.distributed.sharding import empty_parameter, part_of
from scalerun.modules.activations import Activation
from scalerun.modules.drop_path import dropout
from scalerun.modules.feed_forward import FeedForwardInit
from scalerun.modules.init import Initializer, ones, zeros
from scalerun.modules.megatron.mappings import copy_to, reduce_from
from scalerun.modules.megatron.normalize import normalize_spread
from scalerun.modules.moe.dispatch import Dispatch, has_grouped_products

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

EXPERTS = "experts"
"""Every parameter of an expert lies below a module of this name, and no other parameter does."""


def is_expert_parameter(name: str) -> bool:
    """Whether a parameter is a stack over experts (dimension 0), by its canonical name."""
    return EXPERTS in name.split(".")


@dataclass(frozen=True)
class ExpertPlacement:
    """How many experts a layer has, and where."""

    num_experts: int
    """E, on all ranks together."""
    mesh: DeviceMesh | None = None
    """Ranks that each hold an equal number of neighbours; None where this rank holds all."""
    tp_mesh: DeviceMesh | None = None
    """Ranks that each have an equal part of every expert's F activations; None for all of them."""
    both_axes: DeviceMesh | None = None
    """(mesh, tp_mesh); needed where there are both."""

    def parameter(self, *shape: int, cut: int | None = None) -> nn.Parameter:
        """An unset parameter: a stack of one such tensor for each expert.

        Args:
            cut: the dimension of the stack that F is, if any.
        """
        whole = (self.num_experts, *shape)
        if cut is None or self.tp_mesh is None:
            return empty_parameter(whole, mesh=self.mesh)
        if self.both_axes is not None:
            return empty_parameter(whole, mesh=self.both_axes, dim=(0, cut))
        assert self.mesh is None
        return empty_parameter(whole, mesh=self.tp_mesh, dim=cut)

    def held(self, parameter: nn.Parameter, *, cut: bool = True) -> Tensor:
        """The part of a stack that is on this rank.

        Args:
            cut: one of the stack's dimensions is F.
        """
        return part_of(parameter, self.tp_mesh if cut and self.tp_mesh is not None else self.mesh)


class StackedNorm(nn.Module):
    """A norm with a gain, and for LayerNorm a bias, for each expert.

    Args:
        placement: the experts.
        dim: F.
        eps: added to the variance.
        rms: RMSNorm in place of LayerNorm.
    """

    def __init__(self, placement: ExpertPlacement, dim: int, *, eps: float, rms: bool) -> None:
        super().__init__()
        self.placement = placement
        self.dim = dim
        self.eps = eps
        self.weight = placement.parameter(dim, cut=1)
        self.bias = None if rms else placement.parameter(dim, cut=1)

    def initializers(self) -> dict[str, Initializer]:
        return {"weight": ones} if self.bias is None else {"weight": ones, "bias": zeros}

    def forward(self, h_RF: Tensor, dispatch: Dispatch) -> Tensor:
        weight_RF = dispatch.spread(self.placement.held(self.weight).to(h_RF.dtype))
        normed_RF = self.normalized(h_RF)
        if self.bias is None:
            return normed_RF * weight_RF
        bias_RF = dispatch.spread(self.placement.held(self.bias).to(h_RF.dtype))
        return torch.addcmul(bias_RF, normed_RF, weight_RF)

    def normalized(self, h_RF: Tensor) -> Tensor:
        """Without gains, over all features, whatever ranks they are on."""
        center, mesh = self.bias is not None, self.placement.tp_mesh
        if mesh is not None:
            return normalize_spread(h_RF, mesh, eps=self.eps, center=center).to(h_RF.dtype)
        if center:
            return F.layer_norm(h_RF, (self.dim,), None, None, self.eps)
        wide_RF = h_RF if h_RF.dtype == torch.float64 else h_RF.float()
        return F.rms_norm(wide_RF, (self.dim,), None, self.eps).to(h_RF.dtype)


class Experts(nn.Module):
    """E feed-forward layers ``fc2(norm(activation(fc1(x))))`` with biases, each on its own rows.

    A rank computes with the experts that it holds.

    Args:
        placement: the experts.
        dim: D.
        ffn_dim: F.
        init: how each expert's matrices and biases start.
        activation: applied after ``fc1``.
        activation_dropout: rate of activations set to 0 in training.
        dropout: rate of elements of an expert's output set to 0 in training.
        inner_norm: norm over the F activations, or None.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        dim: int,
        ffn_dim: int,
        *,
        init: FeedForwardInit,
        activation: Activation,
        activation_dropout: float = 0.0,
        dropout: float = 0.0,
        inner_norm: StackedNorm | None = None,
    ) -> None:
        super().__init__()
        self.placement = placement
        self.init = init
        self.activation = activation
        self.activation_dropout = activation_dropout
        self.dropout = dropout
        self.fc1_weight = placement.parameter(ffn_dim, dim, cut=1)
        self.fc1_bias = placement.parameter(ffn_dim, cut=1)
        self.inner_norm = inner_norm
        self.fc2_weight = placement.parameter(dim, ffn_dim, cut=2)
        self.fc2_bias = placement.parameter(dim)

    def initializers(self) -> dict[str, Initializer]:
        return {
            "fc1_weight": for_each_expert(self.init.fc1.weight),
            "fc1_bias": for_each_expert(self.init.fc1.bias),
            "fc2_weight": for_each_expert(self.init.fc2.weight),
            "fc2_bias": for_each_expert(self.init.fc2.bias),
        }

    def forward(self, x_RD: Tensor, dispatch: Dispatch) -> Tensor:
        """(R, D) from (R, D), rows of the experts that this rank holds."""
        held, tp_mesh = self.placement.held, self.placement.tp_mesh
        h_RF = dispatch.multiply(copy_to(x_RD, tp_mesh), held(self.fc1_weight))
        h_RF = self.activation(dispatch.add(h_RF, held(self.fc1_bias)))
        h_RF = dropout(h_RF, self.activation_dropout, training=self.training, mesh=tp_mesh)
        if self.inner_norm is not None:
            h_RF = self.inner_norm(h_RF, dispatch)
        y_RD = reduce_from(dispatch.multiply(h_RF, held(self.fc2_weight)), tp_mesh)
        return dispatch.add(y_RD, held(self.fc2_bias, cut=False))

    def output_mask(self, choices_KS: Tensor, dim: int, dtype: torch.dtype) -> Tensor | None:
        """(K, S, D) factors of what experts give for each choice; None where nothing is dropped.

        They are drawn where the tokens are, in the tokens' order, wherever the experts are.
        """
        if not self.training or self.dropout == 0.0:
            return None
        return F.dropout(choices_KS.new_ones((*choices_KS.shape, dim), dtype=dtype), self.dropout)

    def has_grouped_products(self, x_SD: Tensor) -> bool:
        """Whether rows of such tokens can be multiplied group by group."""
        return has_grouped_products(x_SD, *self.placement.held(self.fc1_weight).shape[1:])

    def weights_per_expert(self) -> int:
        """Weights that a row is multiplied with."""
        return self.fc1_weight.shape[1:].numel() + self.fc2_weight.shape[1:].numel()


def for_each_expert(init: Initializer) -> Initializer:
    """Draws each expert's tensor by itself, so that its fans are those of one expert."""

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        for one in tensor.unbind(0):
            init(one, generator)

    return fill
