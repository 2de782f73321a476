"""Attention over several sets of keys, merged into one softmax.

B batch, T tokens, H heads, K width of a head; a branch works on b sequences of t tokens of its own,
which may attend to S keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from scalerun.modules.attention_lse import (
    Attended,
    Options,
    attention_lse,
    attention_lse_backward,
)

MERGE_GRADIENTS = ("torchscale", "exact")


class Keys(NamedTuple):
    """Keys and values that the queries of a branch see."""

    k_bHSK: Tensor
    v_bHSK: Tensor
    options: Options


class Branch(Protocol):
    """A choice of tokens for each head, cut into sequences that attend to themselves."""

    def take(self, x_BTHK: Tensor) -> Tensor:
        """The chosen rows as (b, H, t, K); rows past the end of the sequence are zeros."""

    def keys(self, k_BTHK: Tensor, v_BTHK: Tensor, dropout: float) -> list[Keys]:
        """What the chosen queries see, in one set or several: the chosen rows are the first one."""

    def own_gradients(self, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Gradients of the chosen rows of keys and values, from those of each set."""

    def put(self, x_BTHK: Tensor, part_bHtK: Tensor) -> None:
        """Overwrite the chosen rows."""

    def add(self, x_BTHK: Tensor, part_bHtK: Tensor) -> None:
        """Add to the chosen rows."""

    def whole(self, part_bHtK: Tensor) -> Tensor | None:
        """The rows as (B, T, H, K) if every token of every head is chosen, else None."""


def merge(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHK: Tensor,
    branches: Sequence[Branch],
    *,
    dropout: float = 0.0,
    merge_gradient: str = "torchscale",
) -> Tensor:
    """One softmax over the keys of all branches: (B, T, H, K).

    A key that several branches see counts as often. A head's token that is in no branch gets 0.

    Args:
        branches: which tokens of which heads attend to each other.
        dropout: rate of softmax weights set to 0.
        merge_gradient: ``exact``, or ``torchscale``: the shares of the branches, softmax of their
            log-sum-exps, are constants. The latter is the default since the models that weights
            may come from were trained with it. It leaves out how scores move weight between
            branches, and keeps the output of every branch for the backward pass, where ``exact``
            keeps the merged output alone; both cost the same time.
    """
    exact = merge_gradient == "exact"
    merged: Tensor = MergedAttention.apply(q_BTHK, k_BTHK, v_BTHK, branches, dropout, exact)
    return merged


def accumulate(
    total_BTHK: Tensor | None, branch: Branch, part_bHtK: Tensor, *, like: Tensor
) -> Tensor:
    """The total with a branch's part; None stands for zeros, which are not made if avoidable."""
    if total_BTHK is None:
        total_BTHK = branch.whole(part_bHtK)
        if total_BTHK is not None:
            return total_BTHK
        total_BTHK = torch.zeros_like(like, dtype=part_bHtK.dtype)
    branch.add(total_BTHK, part_bHtK)
    return total_BTHK


def attend_to(q_bHtK: Tensor, sets: Sequence[Keys]) -> tuple[Attended, list[tuple[Tensor, ...]]]:
    """One softmax over several sets of keys, and what each set needs to drop the same again."""
    parts = [attention_lse(q_bHtK, *keys) for keys in sets]
    drawn = [part.drawn for part in parts]
    if len(parts) == 1:
        return parts[0], drawn
    lse_bHt = torch.stack([part.lse_BHT for part in parts]).logsumexp(0)
    out_bHtK = torch.zeros_like(q_bHtK, dtype=lse_bHt.dtype)
    for part in parts:
        out_bHtK += part.out_BHTK * (part.lse_BHT - lse_bHt).exp().unsqueeze(-1)
    return Attended(out_bHtK.to(q_bHtK.dtype), lse_bHt), drawn


class MergedAttention(torch.autograd.Function):
    """:func:`merge`, with a gradient by the kernels' own backward passes.

    Let o and l be output and log-sum-exp of a branch, O and L those of all keys. The exact gradient
    of a branch's q, k and v is its kernel's backward for (O, L) instead of (o, l), as in ring
    attention. With constant shares ``exp(l - L)`` it is the backward for (o, L): the share is a
    factor of the branch's softmax weights, and the rest is the branch's own softmax.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHK: Tensor,
        branches: Sequence[Branch],
        dropout: float,
        exact: bool,
    ) -> Tensor:
        wide = torch.promote_types(q_BTHK.dtype, torch.float32)
        q_BTHK, k_BTHK, v_BTHK = (x.contiguous() for x in (q_BTHK, k_BTHK, v_BTHK))
        parts, drawn = [], []
        lse_BTH1 = q_BTHK.new_full((*q_BTHK.shape[:3], 1), -math.inf, dtype=wide)
        for branch in branches:
            sets = branch.keys(k_BTHK, v_BTHK, dropout)
            part, drawn_by_sets = attend_to(branch.take(q_BTHK), sets)
            parts.append(part)
            drawn.append(drawn_by_sets)
            branch.put(lse_BTH1, torch.logaddexp(branch.take(lse_BTH1), part.lse_BHT.unsqueeze(-1)))
        out_BTHK = None
        for branch, part in zip(branches, parts, strict=True):
            share = (part.lse_BHT.unsqueeze(-1) - branch.take(lse_BTH1)).exp()
            shared = part.out_BHTK * share
            out_BTHK = accumulate(out_BTHK, branch, shared, like=q_BTHK)
        assert out_BTHK is not None
        out_BTHK = out_BTHK.to(q_BTHK.dtype)
        ctx.branches, ctx.dropout, ctx.exact = branches, dropout, exact
        ctx.num_drawn = [[len(tensors) for tensors in by_sets] for by_sets in drawn]
        outs = [out_BTHK] if exact else [part.out_BHTK for part in parts]
        saved = [tensor for by_sets in drawn for tensors in by_sets for tensor in tensors]
        ctx.save_for_backward(q_BTHK, k_BTHK, v_BTHK, lse_BTH1, *outs, *saved)
        return out_BTHK

    @staticmethod
    def backward(ctx: Any, grad_BTHK: Tensor) -> tuple[Tensor | None, ...]:
        branches: Sequence[Branch] = ctx.branches
        q_BTHK, k_BTHK, v_BTHK, lse_BTH1, *rest = ctx.saved_tensors
        num_outs = 1 if ctx.exact else len(branches)
        outs, drawn = rest[:num_outs], iter(rest[num_outs:])
        grad_BTHK = grad_BTHK.contiguous()
        grads: list[Tensor | None] = [None, None, None]
        for i, branch in enumerate(branches):
            q_bHtK, grad_bHtK = branch.take(q_BTHK), branch.take(grad_BTHK)
            out_bHtK = branch.take(outs[0]) if ctx.exact else outs[i]
            lse_bHt = branch.take(lse_BTH1).squeeze(-1)
            q_part, parts = None, []
            sets = branch.keys(k_BTHK, v_BTHK, ctx.dropout)
            for (k, v, options), num_drawn in zip(sets, ctx.num_drawn[i], strict=True):
                attended = Attended(out_bHtK, lse_bHt, tuple(next(drawn) for _ in range(num_drawn)))
                more, k_part, v_part = attention_lse_backward(
                    grad_bHtK, q_bHtK, k, v, attended, options
                )
                q_part = more if q_part is None else q_part + more
                parts.append((k_part, v_part))
            assert q_part is not None
            for j, part in enumerate((q_part, *branch.own_gradients(parts))):
                grads[j] = accumulate(grads[j], branch, part, like=q_BTHK)
        return (*grads, None, None, None)
