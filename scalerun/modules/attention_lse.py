"""Softmax attention that also gives the log-sum-exp of its scores, on the fastest kernel there is.

Attention over several sets of keys can be merged from the results on each set, if the log-sum-exp
of each is known; :mod:`scalerun.modules.merged_attention` does that.

B batch, H heads, T queries, S keys, K width of a head.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

aten = torch.ops.aten

LSE_MULTIPLE = 32
"""Queries to which the memory-efficient CUDA kernel fills up its log-sum-exps."""
BIAS_MULTIPLE = 16
"""Keys of which that kernel wants a multiple when it adds a bias."""


@dataclass(frozen=True)
class Options:
    """What a forward and its backward have to agree on."""

    bias_BHTS: Tensor | None = None
    """Added to the scores, each dimension but the last of full size or 1; every row needs a finite
    entry. It gets no gradient."""
    causal: bool = False
    """Query t sees keys 0..t; only for T = S and without a bias."""
    dropout: float = 0.0
    """Rate of softmax weights set to 0."""


@dataclass(frozen=True)
class Attended:
    """What a query reads, and how much weight there was before the softmax."""

    out_BHTK: Tensor
    lse_BHT: Tensor
    """Natural logarithm of the softmax denominator; float32, or float64 for float64 inputs."""
    drawn: tuple[Tensor, ...] = ()
    """What the kernel needs to drop the same weights again."""


class Kernel(ABC):
    """One way to compute attention, and its gradient."""

    @abstractmethod
    def forward(self, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, options: Options) -> Attended:
        """The outputs and log-sum-exps."""

    @abstractmethod
    def backward(
        self,
        grad_BHTK: Tensor,
        q_BHTK: Tensor,
        k_BHSK: Tensor,
        v_BHSK: Tensor,
        attended: Attended,
        options: Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; see :func:`attention_lse_backward`."""


class CpuFlash(Kernel):
    """torch's flash attention for CPUs."""

    def forward(self, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, options: Options) -> Attended:
        out_BHTK, lse_BHT = aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHTK, k_BHSK, v_BHSK, 0.0, options.causal, attn_mask=options.bias_BHTS
        )
        return Attended(out_BHTK, lse_BHT)

    def backward(
        self,
        grad_BHTK: Tensor,
        q_BHTK: Tensor,
        k_BHSK: Tensor,
        v_BHSK: Tensor,
        attended: Attended,
        options: Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BHTK,
            q_BHTK,
            k_BHSK,
            v_BHSK,
            attended.out_BHTK,
            attended.lse_BHT,
            0.0,
            options.causal,
            attn_mask=options.bias_BHTS,
        )
        return q, k, v


class CudaFlash(Kernel):
    """torch's flash attention for CUDA: half precision, without a bias."""

    def forward(self, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, options: Options) -> Attended:
        out_BHTK, lse_BHT, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            q_BHTK, k_BHSK, v_BHSK, options.dropout, options.causal, False
        )
        return Attended(out_BHTK, lse_BHT, (seed, offset))

    def backward(
        self,
        grad_BHTK: Tensor,
        q_BHTK: Tensor,
        k_BHSK: Tensor,
        v_BHSK: Tensor,
        attended: Attended,
        options: Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = aten._scaled_dot_product_flash_attention_backward(
            grad_BHTK,
            q_BHTK,
            k_BHSK,
            v_BHSK,
            attended.out_BHTK,
            attended.lse_BHT.contiguous(),
            None,
            None,
            q_BHTK.shape[2],
            k_BHSK.shape[2],
            options.dropout,
            options.causal,
            *attended.drawn,
        )
        return q, k, v


class CudaEfficient(Kernel):
    """torch's memory-efficient attention for CUDA: any precision, also with a bias."""

    def forward(self, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, options: Options) -> Attended:
        out_BHTK, lse_BHT, seed, offset = aten._scaled_dot_product_efficient_attention(
            q_BHTK,
            k_BHSK,
            v_BHSK,
            full_bias(q_BHTK, k_BHSK, options),
            True,
            options.dropout,
            options.causal,
        )
        return Attended(out_BHTK, lse_BHT[:, :, : q_BHTK.shape[2]], (seed, offset))

    def backward(
        self,
        grad_BHTK: Tensor,
        q_BHTK: Tensor,
        k_BHSK: Tensor,
        v_BHSK: Tensor,
        attended: Attended,
        options: Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        missing = -q_BHTK.shape[2] % LSE_MULTIPLE
        q, k, v, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_BHTK,
            q_BHTK,
            k_BHSK,
            v_BHSK,
            full_bias(q_BHTK, k_BHSK, options),
            attended.out_BHTK,
            F.pad(attended.lse_BHT, (0, missing), value=math.inf),
            *attended.drawn,
            options.dropout,
            [True, True, True, False],
            options.causal,
        )
        return q, k, v


class PlainSoftmax(Kernel):
    """All scores at once, in float32 or better: for whatever no other kernel can do."""

    def forward(self, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, options: Options) -> Attended:
        with torch.autocast(q_BHTK.device.type, enabled=False):
            scores_BHTS = self.scores(q_BHTK, k_BHSK, options)
            lse_BHT = scores_BHTS.logsumexp(-1)
            weights_BHTS = (scores_BHTS - lse_BHT.unsqueeze(-1)).exp()
            drawn: tuple[Tensor, ...] = ()
            if options.dropout > 0.0:
                kept_BHTS = torch.rand_like(weights_BHTS) >= options.dropout
                weights_BHTS = weights_BHTS * kept_BHTS / (1.0 - options.dropout)
                drawn = (kept_BHTS,)
            out_BHTK = (weights_BHTS @ v_BHSK.to(weights_BHTS.dtype)).to(q_BHTK.dtype)
        return Attended(out_BHTK, lse_BHT, drawn)

    def backward(
        self,
        grad_BHTK: Tensor,
        q_BHTK: Tensor,
        k_BHSK: Tensor,
        v_BHSK: Tensor,
        attended: Attended,
        options: Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(q_BHTK.device.type, enabled=False):
            scores_BHTS = self.scores(q_BHTK, k_BHSK, options)
            wide = scores_BHTS.dtype
            weights_BHTS = (scores_BHTS - attended.lse_BHT.unsqueeze(-1)).exp()
            grad_BHTK = grad_BHTK.to(wide)
            kept_BHTS = None
            if attended.drawn:
                kept_BHTS = attended.drawn[0].to(wide) / (1.0 - options.dropout)
            used_BHTS = weights_BHTS if kept_BHTS is None else weights_BHTS * kept_BHTS
            v_grad = used_BHTS.mT @ grad_BHTK
            grad_BHTS = grad_BHTK @ v_BHSK.to(wide).mT
            if kept_BHTS is not None:
                grad_BHTS = grad_BHTS * kept_BHTS
            mean_BHT1 = (grad_BHTK * attended.out_BHTK).sum(-1, keepdim=True)
            grad_BHTS = weights_BHTS * (grad_BHTS - mean_BHT1) * q_BHTK.shape[-1] ** -0.5
            q_grad, k_grad = grad_BHTS @ k_BHSK.to(wide), grad_BHTS.mT @ q_BHTK.to(wide)
        q, k, v = (grad.to(q_BHTK.dtype) for grad in (q_grad, k_grad, v_grad))
        return q, k, v

    def scores(self, q_BHTK: Tensor, k_BHSK: Tensor, options: Options) -> Tensor:
        """(B, H, T, S) with -inf where a key may not be seen."""
        wide = torch.promote_types(q_BHTK.dtype, torch.float32)
        scores_BHTS = q_BHTK.to(wide) * q_BHTK.shape[-1] ** -0.5 @ k_BHSK.to(wide).mT
        if options.bias_BHTS is not None:
            scores_BHTS = scores_BHTS + options.bias_BHTS
        if options.causal:
            later_TS = torch.ones_like(scores_BHTS[0, 0], dtype=torch.bool).triu(1)
            scores_BHTS = scores_BHTS.masked_fill(later_TS, -math.inf)
        return scores_BHTS


def full_bias(q_BHTK: Tensor, k_BHSK: Tensor, options: Options) -> Tensor | None:
    """The bias for every batch entry, head and query, without a copy."""
    if options.bias_BHTS is None:
        return None
    return options.bias_BHTS.expand(*q_BHTK.shape[:3], k_BHSK.shape[2])


def kernel_for(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, options: Options) -> Kernel:
    """The fastest kernel that can do it."""
    if q_BHTK.device.type == "cpu":
        return CpuFlash() if options.dropout == 0.0 else PlainSoftmax()
    if q_BHTK.is_cuda and (options.bias_BHTS is None or k_BHSK.shape[2] % BIAS_MULTIPLE == 0):
        bias = full_bias(q_BHTK, k_BHSK, options)
        asked = SDPAParams(q_BHTK, k_BHSK, v_BHSK, bias, options.dropout, options.causal, False)
        # The operators themselves want a width that scaled_dot_product_attention would fill up.
        if q_BHTK.shape[-1] % 8 == 0:
            if can_use_flash_attention(asked):
                return CudaFlash()
            if can_use_efficient_attention(asked):
                return CudaEfficient()
    return PlainSoftmax()


def attention_lse(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, options: Options | None = None
) -> Attended:
    """Softmax attention with scale ``K**-0.5``, outside of autograd.

    Its gradient is :func:`attention_lse_backward`.
    """
    options = Options() if options is None else options
    kernel = kernel_for(q_BHTK, k_BHSK, v_BHSK, options)
    return kernel.forward(q_BHTK, k_BHSK, v_BHSK, options)


def attention_lse_backward(
    grad_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    attended: Attended,
    options: Options | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from the gradient of the output.

    With ``p = exp(score - lse)`` the gradient of a score is ``p * (grad . v - grad . out)``. So
    ``attended`` need not be what :func:`attention_lse` returned: with the output and log-sum-exp
    of attention over more keys than these, of which these are a part, the results are their part
    of that attention's gradients (Liu et al. 2023, arXiv:2310.01889).
    """
    options = Options() if options is None else options
    kernel = kernel_for(q_BHTK, k_BHSK, v_BHSK, options)
    return kernel.backward(grad_BHTK, q_BHTK, k_BHSK, v_BHSK, attended, options)
