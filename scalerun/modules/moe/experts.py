"""The experts of a layer, as stacks of weights.

E experts, R rows of tokens sorted by expert, D model width, F inner width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalerun.modules.drop_path import dropout
from scalerun.modules.feed_forward import Activation, FeedForwardInit
from scalerun.modules.init import Initializer, ones, zeros
from scalerun.modules.moe.dispatch import Dispatch, has_grouped_products

EXPERTS = "experts"
"""Every parameter of an expert lies below a module of this name, and no other parameter does."""


def is_expert_parameter(name: str) -> bool:
    """Whether a parameter is a stack over experts (dimension 0), by its canonical name."""
    return EXPERTS in name.split(".")


class StackedNorm(nn.Module):
    """A norm with a gain, and for LayerNorm a bias, for each expert.

    Args:
        num_experts: E.
        dim: F.
        eps: added to the variance.
        rms: RMSNorm in place of LayerNorm.
    """

    def __init__(self, num_experts: int, dim: int, *, eps: float, rms: bool) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.bias = None if rms else nn.Parameter(torch.empty(num_experts, dim))

    def initializers(self) -> dict[str, Initializer]:
        return {"weight": ones} if self.bias is None else {"weight": ones, "bias": zeros}

    def forward(self, h_RF: Tensor, dispatch: Dispatch) -> Tensor:
        weight_RF = dispatch.spread(self.weight.to(h_RF.dtype))
        if self.bias is None:
            wide_RF = h_RF if h_RF.dtype == torch.float64 else h_RF.float()
            return F.rms_norm(wide_RF, (self.dim,), None, self.eps).to(h_RF.dtype) * weight_RF
        normed_RF = F.layer_norm(h_RF, (self.dim,), None, None, self.eps)
        return torch.addcmul(dispatch.spread(self.bias.to(h_RF.dtype)), normed_RF, weight_RF)


class Experts(nn.Module):
    """E feed-forward layers ``fc2(norm(activation(fc1(x))))`` with biases, each on its own rows.

    Args:
        num_experts: E.
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
        num_experts: int,
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
        self.init = init
        self.activation = activation
        self.activation_dropout = activation_dropout
        self.dropout = dropout
        self.fc1_weight = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))
        self.fc1_bias = nn.Parameter(torch.empty(num_experts, ffn_dim))
        self.inner_norm = inner_norm
        self.fc2_weight = nn.Parameter(torch.empty(num_experts, dim, ffn_dim))
        self.fc2_bias = nn.Parameter(torch.empty(num_experts, dim))

    def initializers(self) -> dict[str, Initializer]:
        return {
            "fc1_weight": for_each_expert(self.init.fc1.weight),
            "fc1_bias": for_each_expert(self.init.fc1.bias),
            "fc2_weight": for_each_expert(self.init.fc2.weight),
            "fc2_bias": for_each_expert(self.init.fc2.bias),
        }

    def forward(self, x_RD: Tensor, dispatch: Dispatch) -> Tensor:
        """(R, D) from (R, D)."""
        h_RF = dispatch.multiply(x_RD, self.fc1_weight)
        h_RF = self.activation(dispatch.add(h_RF, self.fc1_bias))
        h_RF = dropout(h_RF, self.activation_dropout, training=self.training)
        if self.inner_norm is not None:
            h_RF = self.inner_norm(h_RF, dispatch)
        y_RD = dispatch.add(dispatch.multiply(h_RF, self.fc2_weight), self.fc2_bias)
        return dropout(y_RD, self.dropout, training=self.training)

    def has_grouped_products(self, x_SD: Tensor) -> bool:
        """Whether rows of such tokens can be multiplied group by group."""
        return has_grouped_products(x_SD, *self.fc1_weight.shape[1:])

    def weights_per_expert(self) -> int:
        """Weights that a row is multiplied with."""
        return self.fc1_weight[0].numel() + self.fc2_weight[0].numel()


def for_each_expert(init: Initializer) -> Initializer:
    """Draws each expert's tensor by itself, so that its fans are those of one expert."""

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        for one in tensor.unbind(0):
            init(one, generator)

    return fill
