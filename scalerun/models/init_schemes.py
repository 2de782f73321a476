"""How all weights of a transformer start: the papers' way, TorchScale's, Megatron's, BERT's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scalerun.modules.attention import AttentionInit
from scalerun.modules.feed_forward import FeedForwardInit
from scalerun.modules.init import Initializer, LinearInit, normal, uniform, xavier_normal, zeros

BERT_SIGMA = 0.02


@dataclass(frozen=True)
class ModelInit:
    """Initializers of every kind of weight."""

    attention: AttentionInit
    ffn: FeedForwardInit
    embedding: Initializer
    positions: Initializer
    relative_bias: Initializer
    output: LinearInit
    gate: Initializer
    """What a mixture's tokens are multiplied with to choose experts."""


def paper(dim: int, *, gain: float, padding_idx: int | None) -> ModelInit:
    """Xavier-normal with ``gain`` for value, output and feed-forward weights, 1 for q and k.

    Biases are 0; embeddings and learned positions are N(0, 1 / dim); gates start uniform within
    ``1 / sqrt(dim)``. The gain is DeepNorm's beta
    (arXiv:2203.00555, figure 2), SubLN's gamma (arXiv:2210.06423, figure 2), or 1.
    """
    plain = LinearInit(xavier_normal(1.0), zeros)
    scaled = LinearInit(xavier_normal(gain), zeros)
    return ModelInit(
        attention=AttentionInit(q=plain, k=plain, v=scaled, out=scaled),
        ffn=FeedForwardInit(fc1=scaled, fc2=scaled, gate=plain),
        embedding=normal(dim**-0.5, zero_row=padding_idx),
        positions=normal(dim**-0.5),
        relative_bias=normal(0.02),
        output=LinearInit(normal(dim**-0.5), zeros),
        gate=uniform(dim**-0.5),
    )


def torchscale(dim: int, ffn_dim: int, *, gain: float, padding_idx: int | None) -> ModelInit:
    """What TorchScale's code does: uniform within ``1 / sqrt(fan_in)``, biases included.

    The gain multiplies value, output and feed-forward weights and their biases. Positions and
    relative biases are N(0, 1).
    """

    def linear(fan_in: int, factor: float) -> LinearInit:
        draw = uniform(factor / math.sqrt(fan_in))
        return LinearInit(draw, draw)

    plain, scaled = linear(dim, 1.0), linear(dim, gain)
    return ModelInit(
        attention=AttentionInit(q=plain, k=plain, v=scaled, out=scaled),
        ffn=FeedForwardInit(fc1=scaled, fc2=linear(ffn_dim, gain), gate=plain),
        embedding=normal(dim**-0.5, zero_row=padding_idx),
        positions=normal(1.0),
        relative_bias=normal(1.0),
        output=LinearInit(normal(dim**-0.5), zeros),
        gate=uniform(dim**-0.5),
    )


def bert(*, gain: float, padding_idx: int | None) -> ModelInit:
    """N(0, 0.02**2), times ``gain`` for value, output and feed-forward weights; biases 0.

    Source: Devlin et al. 2018, arXiv:1810.04805; the gain as in TorchScale's ``bert_init``.
    """
    plain = LinearInit(normal(BERT_SIGMA), zeros)
    scaled = LinearInit(normal(BERT_SIGMA * gain), zeros)
    return ModelInit(
        attention=AttentionInit(q=plain, k=plain, v=scaled, out=scaled),
        ffn=FeedForwardInit(fc1=scaled, fc2=scaled, gate=plain),
        embedding=normal(BERT_SIGMA, zero_row=padding_idx),
        positions=normal(BERT_SIGMA),
        relative_bias=normal(BERT_SIGMA),
        output=plain,
        gate=normal(BERT_SIGMA),
    )


def megatron(num_layers: int, *, sigma: float, padding_idx: int | None) -> ModelInit:
    """N(0, sigma**2) everywhere, over ``sqrt(2 * num_layers)`` where a branch ends; biases 0.

    Source: Shoeybi et al. 2019, arXiv:1909.08053; OPT (arXiv:2205.01068) used sigma 0.006.
    """
    draw = normal(sigma)
    plain = LinearInit(draw, zeros)
    last = LinearInit(normal(sigma / math.sqrt(2.0 * num_layers)), zeros)
    return ModelInit(
        attention=AttentionInit(q=plain, k=plain, v=plain, out=last),
        ffn=FeedForwardInit(fc1=plain, fc2=last, gate=plain),
        embedding=normal(sigma, zero_row=padding_idx),
        positions=draw,
        relative_bias=draw,
        output=plain,
        gate=draw,
    )
