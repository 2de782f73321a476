"""Which experts each token goes to, with what weight, and which of its choices find a place.

S tokens, K choices of a token (1 or 2), E experts. Choices are held choice-major, (K, S): all first
choices come before all second ones, and within a choice tokens are in the order of their rows.

Sources: Lepikhin et al. 2020, arXiv:2006.16668 (top-2, GShard); Fedus et al. 2021, arXiv:2101.03961
(top-1, Switch); Chi et al. 2022, arXiv:2204.09179 (X-MoE).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from scalerun.modules.moe.gates import Gate
from scalerun.modules.moe.routing_stats import routing_stats

Count = TypeVar("Count", int, Tensor)


@dataclass(frozen=True)
class Gating:
    """The rules of routing."""

    top_k: int = 2
    """Choices of a token: 1 or 2."""
    second_expert: str = "random"
    """When the second choice is used: ``all``: always; ``random``: with probability twice its
    weight; ``sampling``: always, but it is drawn with Gumbel noise on the logits."""
    normalize_before_dropping: bool = False
    """The two weights of a token add up to 1 before any choice is dropped, and not after."""
    float32: bool = True
    """Compute the gate and everything up to the weights in float32 (float64 stays float64)."""
    eval_capacity_fraction: float = -1.0
    """Places of an expert in evaluation, as a share of the tokens; not above 0: as in training."""
    deterministic_eval: bool = True
    """Draw nothing in evaluation: ``random`` keeps a second choice that is kept with probability
    above 1/2, ``sampling`` adds no noise."""

    def capacity(self, num_tokens: Count, num_experts: int, *, training: bool) -> Count:
        """Places of an expert for so many routed tokens (an int, or a float64 tensor)."""
        if not training and self.eval_capacity_fraction > 0:
            return -(-self.eval_capacity_fraction * num_tokens // 1)  # type: ignore[return-value]
        return self.top_k * -(-num_tokens // num_experts)


@dataclass(frozen=True)
class Choices:
    """Which tokens go to which experts."""

    experts_KS: Tensor
    """int64."""
    kept_KS: Tensor
    """bool: the choice has a place."""
    places_KS: Tensor
    """int64: how many choices of the same expert come before. Meaningless where not kept."""
    capacity: int
    """No expert has more kept choices."""
    num_experts: int

    def counts_E(self) -> Tensor:
        """(E,) int64, the kept choices of each expert."""
        counts_E = torch.zeros(self.num_experts, dtype=torch.int64, device=self.kept_KS.device)
        return counts_E.scatter_add_(0, self.experts_KS.flatten(), self.kept_KS.flatten().long())


@dataclass(frozen=True)
class Routing(Choices):
    """Where the tokens go, and what comes of it."""

    weights_KS: Tensor
    """Of the experts' outputs in the sum; 0 where a choice is dropped. Carries the gradient."""
    loss: Tensor
    """Balance loss: E * sum over e of (mean gate probability of e) * (share of first choices);
    1 for uniform routing. Its gradient goes through the probabilities."""
    stats: dict[str, Tensor]


class Router(nn.Module):
    """A gate and the rules by which its logits become choices.

    Args:
        gate: gives the logits.
        gating: the rules.
    """

    def __init__(self, gate: Gate, gating: Gating) -> None:
        super().__init__()
        self.gate = gate
        self.gating = gating

    def forward(self, x_SD: Tensor, padding_S: Tensor | None = None) -> Routing:
        """Route tokens; those that are padding go nowhere and count nowhere."""
        if not self.gating.float32:
            return route(self.gate(x_SD), self.gating, training=self.training, padding_S=padding_S)
        with torch.autocast(x_SD.device.type, enabled=False):
            logits_SE = self.gate(x_SD if x_SD.dtype == torch.float64 else x_SD.float())
            return route(logits_SE, self.gating, training=self.training, padding_S=padding_S)


def route(
    logits_SE: Tensor, gating: Gating, *, training: bool, padding_S: Tensor | None = None
) -> Routing:
    """The choices that logits make, computed in the logits' own precision.

    Ties go to the expert with the lowest number. The order of steps decides the result: choose,
    weigh, drop second choices at random, take out padding, hand out places (first choices before
    second ones), drop what finds no place, normalise the weights.

    Args:
        logits_SE: (S, E).
        gating: the rules.
        training: decides the capacity and whether random numbers are drawn.
        padding_S: (S,) bool, or None if no token is padding.
    """
    num_tokens, num_experts = logits_SE.shape
    draws = training or not gating.deterministic_eval
    probs_SE = torch.softmax(logits_SE, dim=-1)
    experts_KS = _choose(logits_SE, gating, draws=draws)
    weights_KS = probs_SE.gather(1, experts_KS.t()).t()
    real_KS = torch.ones_like(experts_KS, dtype=torch.bool)
    if padding_S is not None:
        real_KS = real_KS & ~padding_S
    if gating.top_k == 2 and gating.normalize_before_dropping:
        weights_KS = _normalized(weights_KS)
    wanted_KS = real_KS
    if gating.top_k == 2 and gating.second_expert == "random":
        second_S = 2.0 * weights_KS[1].detach()
        threshold_S = torch.rand_like(second_S) if draws else second_S.new_tensor(0.5)
        wanted_KS = torch.stack((real_KS[0], real_KS[1] & (second_S > threshold_S)))
    capacity = int(gating.capacity(num_tokens, num_experts, training=training))
    limit: Tensor | int = capacity
    if padding_S is not None:
        # Stays on the device: the host need not know how many tokens are real.
        num_real = real_KS[0].sum(dtype=torch.float64)
        limit = gating.capacity(num_real, num_experts, training=training)
    places_KS = _places(experts_KS, wanted_KS, num_experts)
    kept_KS = wanted_KS & (places_KS < limit)
    weights_KS = weights_KS.masked_fill(~kept_KS, 0.0)
    if gating.top_k == 2 and not gating.normalize_before_dropping:
        weights_KS = _normalized(weights_KS)
    return Routing(
        experts_KS=experts_KS,
        weights_KS=weights_KS,
        kept_KS=kept_KS,
        places_KS=places_KS,
        capacity=capacity,
        num_experts=num_experts,
        loss=_balance_loss(probs_SE, experts_KS[0], real_KS[0]),
        stats=routing_stats(
            probs_SE.detach(), experts_KS, real_KS=real_KS, wanted_KS=wanted_KS, kept_KS=kept_KS
        ),
    )


def _choose(logits_SE: Tensor, gating: Gating, *, draws: bool) -> Tensor:
    """(K, S) experts, the best first; with one expert both choices are that one."""
    logits_SE = logits_SE.detach()
    first_S = logits_SE.argmax(-1)
    if gating.top_k == 1:
        return first_S.unsqueeze(0)
    if gating.second_expert == "sampling" and draws:
        logits_SE = logits_SE + _gumbel_like(logits_SE)
    rest_SE = logits_SE.scatter(1, first_S.unsqueeze(1), -math.inf)
    return torch.stack((first_S, rest_SE.argmax(-1)))


def _gumbel_like(x: Tensor) -> Tensor:
    """Draws from the standard Gumbel distribution, one uniform number for each."""
    info = torch.finfo(x.dtype)
    uniform = info.tiny + torch.rand_like(x) * (1.0 - info.eps - info.tiny)
    return -(-uniform.log()).log()


def _normalized(weights_KS: Tensor) -> Tensor:
    """Each token's weights over their sum."""
    smallest = torch.finfo(weights_KS.dtype).eps
    return weights_KS / weights_KS.sum(0, keepdim=True).clamp(min=smallest)


def _places(experts_KS: Tensor, wanted_KS: Tensor, num_experts: int) -> Tensor:
    """For each wanted choice, how many wanted choices of the same expert come before it."""
    # Short integers are sorted ten times as fast as long ones.
    dtype = torch.int16 if num_experts < 2**15 else torch.int32
    keys = experts_KS.masked_fill(~wanted_KS, num_experts).flatten().to(dtype)
    keys, order = torch.sort(keys, stable=True)
    all_experts = torch.arange(num_experts + 1, dtype=dtype, device=keys.device)
    starts = torch.searchsorted(keys, all_experts)
    rank = torch.arange(keys.numel(), device=keys.device) - starts[keys.long()]
    return torch.empty_like(rank).scatter_(0, order, rank).view_as(experts_KS)


def _balance_loss(probs_SE: Tensor, first_S: Tensor, real_S: Tensor) -> Tensor:
    num_experts = probs_SE.shape[1]
    dtype = torch.promote_types(probs_SE.dtype, torch.float32)
    real_S = real_S.to(dtype)
    count = real_S.sum().clamp(min=1.0)
    mean_E = real_S @ probs_SE.to(dtype) / count
    share_E = real_S.new_zeros(num_experts).scatter_add_(0, first_S, real_S) / count
    return num_experts * (mean_E * share_E).sum()
