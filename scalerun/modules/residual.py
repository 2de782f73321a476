"""Where the norm of a residual branch sits, and how branch and stream are added.

B batch, T time, D model width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from torch import Tensor, nn

from scalerun.modules.block_context import BlockContext
from scalerun.modules.drop_path import drop_path, dropout
from scalerun.modules.megatron.mappings import TIME
from scalerun.modules.norm import normed


class Residual(nn.Module, ABC):
    """Surrounds a branch: ``after(x, branch(before(x)))``.

    Args:
        norm: the one norm of the branch.
        alpha: factor of the residual stream, never of the branch.
        dropout: rate of elements of the branch's output set to 0.
        drop_path: rate of whole samples of the branch's output set to 0, after dropout.
    """

    def __init__(
        self,
        norm: nn.Module,
        *,
        alpha: float = 1.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.alpha = alpha
        self.dropout = dropout
        self.drop_path = drop_path

    @abstractmethod
    def before(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        """What the branch reads."""

    @abstractmethod
    def after(self, x_BTD: Tensor, y_BTD: Tensor, context: BlockContext) -> Tensor:
        """The new stream, from the old one and the branch's output."""

    def add(self, x_BTD: Tensor, y_BTD: Tensor, context: BlockContext) -> Tensor:
        """``alpha * x + y``, with what regularises y in training."""
        y_BTD = dropout(
            y_BTD, self.dropout, training=self.training, mesh=context.time_mesh, dim=TIME
        )
        y_BTD = drop_path(y_BTD, self.drop_path, training=self.training)
        return (x_BTD if self.alpha == 1.0 else self.alpha * x_BTD) + y_BTD


class PreNorm(Residual):
    """``alpha * x + branch(norm(x))``; alpha is 1 except in some models of TorchScale."""

    def before(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        return normed(self.norm, x_BTD, context)

    def after(self, x_BTD: Tensor, y_BTD: Tensor, context: BlockContext) -> Tensor:
        return self.add(x_BTD, y_BTD, context)


class PostNorm(Residual):
    """``norm(x + branch(x))``, as in Vaswani et al. 2017, arXiv:1706.03762."""

    def before(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        return x_BTD

    def after(self, x_BTD: Tensor, y_BTD: Tensor, context: BlockContext) -> Tensor:
        return normed(self.norm, self.add(x_BTD, y_BTD, context), context)


class DeepNorm(PostNorm):
    """``norm(alpha * x + branch(x))``: post-norm that stays stable at a thousand layers.

    Source: Wang et al. 2022, arXiv:2203.00555. For N decoder-only layers alpha = (2N)**(1/4) and
    the init gain of value, output and feed-forward weights is (8N)**(-1/4).
    """


def deepnorm_alpha(num_layers: int) -> float:
    """Factor of the residual stream for an encoder or a decoder alone (arXiv:2203.00555)."""
    return (2.0 * num_layers) ** 0.25


def deepnorm_gain(num_layers: int) -> float:
    """Init gain beta for an encoder or a decoder alone (arXiv:2203.00555)."""
    return (8.0 * num_layers) ** -0.25


def deepnorm_encoder_alpha(num_layers: int, decoder_layers: int) -> float:
    """Factor of the encoder's residual stream under a decoder (arXiv:2203.00555, figure 2)."""
    return 0.81 * (num_layers**4 * decoder_layers) ** (1 / 16)


def deepnorm_encoder_gain(num_layers: int, decoder_layers: int) -> float:
    """Init gain beta of an encoder under a decoder (arXiv:2203.00555, figure 2).

    TorchScale's code has 1.15, the inverse of the paper's 0.87.
    """
    return 0.87 * (num_layers**4 * decoder_layers) ** (-1 / 16)


def deepnorm_decoder_alpha(num_layers: int) -> float:
    """Factor of the residual stream of a decoder over an encoder (arXiv:2203.00555, figure 2)."""
    return (3.0 * num_layers) ** 0.25


def deepnorm_decoder_gain(num_layers: int) -> float:
    """Init gain beta of a decoder over an encoder (arXiv:2203.00555, figure 2)."""
    return (12.0 * num_layers) ** -0.25


def subln_gain(num_layers: int) -> float:
    """Init gain gamma for an encoder or a decoder alone (Wang et al. 2022, arXiv:2210.06423)."""
    return math.sqrt(math.log(2.0 * num_layers))


def subln_encoder_gain(num_layers: int, decoder_layers: int) -> float:
    """Init gain gamma of an encoder under a decoder (arXiv:2210.06423, figure 2)."""
    return math.sqrt(math.log(3.0 * decoder_layers) * math.log(2.0 * num_layers) / 3.0)


def subln_decoder_gain(num_layers: int) -> float:
    """Init gain gamma of a decoder over an encoder (arXiv:2210.06423, figure 2)."""
    return math.sqrt(math.log(3.0 * num_layers))
