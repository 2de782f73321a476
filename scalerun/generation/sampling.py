"""From logits to the next token, each row by its own rules.

B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def choose_tokens(
    logits_BV: Tensor,
    *,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    uniform_B: Tensor,
) -> Tensor:
    """Draw one token for each row: (B,) int64.

    Order of the rules: temperature, top-k, top-p on what is left, min-p. A row is a function of
    its own logits, rules and uniform number alone, and tokens keep their place on the line that the
    number is thrown at, so that a rounding error in a logit moves a border and no more.

    Args:
        logits_BV: any floats; ``-inf`` for tokens that must not be chosen.
        temperature_B: 0 takes the most likely token (the lowest id of equals).
        top_k_B: int64, how many of the most likely tokens are left (ties: lower ids); 0 leaves all.
        top_p_B: the smallest set of most likely tokens whose mass reaches this is left, with the
            token that crosses it; 1 leaves all.
        min_p_B: tokens with less than this share of the likeliest one's probability are left out.
        uniform_B: float64 in [0, 1).
    """
    greedy_B = logits_BV.argmax(-1)
    if bool((temperature_B == 0).all()):
        return greedy_B
    # The largest becomes 0, so that no temperature above 0 can overflow.
    shifted_BV = logits_BV.double() - logits_BV.double().amax(-1, keepdim=True)
    scaled_BV = shifted_BV / temperature_B.double().masked_fill(temperature_B == 0, 1.0)[:, None]
    if bool((top_k_B > 0).any()) or bool((top_p_B < 1).any()):
        kept_BV = most_likely(scaled_BV, top_k_B=top_k_B, top_p_B=top_p_B)
        scaled_BV = scaled_BV.masked_fill(~kept_BV, float("-inf"))
    if bool((min_p_B > 0).any()):
        # The likeliest token, which no rule takes away, has the scaled logit 0.
        least_B = min_p_B.double().log()
        scaled_BV = scaled_BV.masked_fill(scaled_BV < least_B[:, None], float("-inf"))
    return torch.where(temperature_B == 0, greedy_B, draw(scaled_BV.softmax(-1), uniform_B))


def penalized(
    logits_BV: Tensor,
    *,
    counts_BV: Tensor,
    in_prompt_BV: Tensor,
    repetition_B: Tensor,
    presence_B: Tensor,
    frequency_B: Tensor,
) -> Tensor:
    """Logits (B, V) that hold against tokens that they were said before.

    Args:
        logits_BV: any floats.
        counts_BV: how often each answer has each token so far.
        in_prompt_BV: bool, which tokens each prompt has.
        repetition_B: divides the logits of tokens that prompt or answer has, multiplies negative
            ones (Keskar et al. 2019, arXiv:1909.05858, section 4.1).
        presence_B: taken off, after that, where the answer has the token.
        frequency_B: taken off as often as the answer has it.
    """
    in_answer_BV = counts_BV > 0
    factor_B1 = repetition_B.to(logits_BV)[:, None]
    repeated_BV = torch.where(logits_BV > 0, logits_BV / factor_B1, logits_BV * factor_B1)
    logits_BV = torch.where(in_prompt_BV | in_answer_BV, repeated_BV, logits_BV)
    off_BV = presence_B[:, None] * in_answer_BV + frequency_B[:, None] * counts_BV
    return logits_BV - off_BV.to(logits_BV)


def most_likely(logits_BV: Tensor, *, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Which tokens top-k and, after it, top-p leave over: (B, V) bool, at least one in each row.

    The mass of top-p is that among the tokens which top-k has left.
    """
    sorted_BV, order_BV = logits_BV.double().sort(dim=-1, descending=True, stable=True)
    vocabulary = logits_BV.shape[-1]
    rank_V = torch.arange(vocabulary, device=logits_BV.device)
    limit_B = torch.where(top_k_B > 0, top_k_B, vocabulary)
    kept_BV = rank_V < limit_B[:, None]
    mass_BV = sorted_BV.masked_fill(~kept_BV, float("-inf")).softmax(-1).cumsum(-1)
    mass_before_BV = mass_BV.roll(1, dims=-1)
    mass_before_BV[:, 0] = 0.0
    # Rounding may bring the mass to 1 before the last token: a limit of 1 has to leave it.
    below_BV = (mass_before_BV < top_p_B[:, None]) | (top_p_B[:, None] >= 1)
    kept_BV = kept_BV & below_BV
    kept_BV[:, 0] = True
    return torch.zeros_like(kept_BV).scatter(-1, order_BV, kept_BV)


def draw(probabilities_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The token on which a uniform number in [0, 1) falls: (B,) int64, never one of mass 0."""
    cumulative_BV = probabilities_BV.double().cumsum(-1)
    total_B1 = cumulative_BV[:, -1:].clone()
    point_B1 = uniform_B.to(total_B1)[:, None] * total_B1
    point_B1 = torch.minimum(point_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))
    return torch.searchsorted(cumulative_BV, point_B1, right=True)[:, 0]
