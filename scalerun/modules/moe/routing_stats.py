"""What is logged of a routing; the names are TorchScale's.

S tokens, K choices of a token, E experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def routing_stats(
    probs_SE: Tensor,
    experts_KS: Tensor,
    *,
    real_KS: Tensor,
    wanted_KS: Tensor,
    kept_KS: Tensor,
) -> dict[str, Tensor]:
    """Scalars, and one vector: ``expert_load``.

    Args:
        probs_SE: gate probabilities.
        experts_KS: the choices.
        real_KS: whether a token is no padding; only these count.
        wanted_KS: what is left after second choices were dropped at random.
        kept_KS: what is left after the experts were full.

    Returns:
        ``entropy_gating`` in nats; ``overflow_expert<k>``, the percentage of wanted k-th choices
        that found no place; ``unused_expert<k>_count``, experts that are nobody's k-th choice;
        ``expert<k>_balance_top`` and ``_bottom``, the percentage of k-th choices of the fifth of
        experts with the most and with the fewest; ``expert_load``, the share of all wanted choices
        of each expert. With one choice there are no overflow and no second-choice entries.
    """
    num_experts = probs_SE.shape[1]
    probs_SE = probs_SE.float()
    real_S = real_KS[0].float()
    num_real = real_S.sum().clamp(min=1.0)
    entropy_S = torch.special.entr(probs_SE).sum(-1)
    stats = {"entropy_gating": (entropy_S * real_S).sum() / num_real}
    wanted = _count(experts_KS.flatten(), wanted_KS.flatten(), num_experts)
    stats["expert_load"] = wanted / wanted.sum().clamp(min=1.0)
    fifth = max(math.ceil(0.2 * num_experts), 1)
    for k, (experts_S, real_S) in enumerate(zip(experts_KS, real_KS, strict=True), start=1):
        counts_E = _count(experts_S, real_S, num_experts)
        percent_E = 100.0 * counts_E.sort(descending=True).values / num_real
        stats[f"unused_expert{k}_count"] = (counts_E == 0).sum().float()
        stats[f"expert{k}_balance_top"] = percent_E[:fifth].sum()
        stats[f"expert{k}_balance_bottom"] = percent_E[-fifth:].sum()
    if len(experts_KS) == 2:
        wanted_K, kept_K = wanted_KS.sum(1), kept_KS.sum(1)
        percent_K = 100.0 * (wanted_K - kept_K) / wanted_K.clamp(min=1)
        stats["overflow_expert1"], stats["overflow_expert2"] = percent_K.float().unbind(0)
    return stats


def _count(experts_N: Tensor, counted_N: Tensor, num_experts: int) -> Tensor:
    """(E,) float32, how often each expert is chosen among those that count."""
    zeros = torch.zeros(num_experts, device=experts_N.device)
    return zeros.scatter_add_(0, experts_N, counted_N.float())
