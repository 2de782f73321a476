"""The layer as its formulas say it: one-hot tensors of tokens * experts * places, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from scalerun.distributed.sharding import fill
from scalerun.modules.feed_forward import FeedForwardInit
from scalerun.modules.init import LinearInit, initialize, normal
from scalerun.modules.moe.experts import ExpertPlacement, Experts, StackedNorm
from scalerun.modules.moe.gates import GATES
from scalerun.modules.moe.moe_layer import MoELayer
from scalerun.modules.moe.router import Gating, Router

DIM, FFN = 8, 12
ROUGH = LinearInit(normal(0.4), normal(0.3))
ROUGH_FFN = FeedForwardInit(fc1=ROUGH, fc2=ROUGH, gate=ROUGH)


@dataclass
class Expected:
    combine_SEC: Tensor
    loss: Tensor
    stats: dict[str, Tensor]


def one_hot(index_S: Tensor, size: int) -> Tensor:
    return torch.nn.functional.one_hot(index_S, size).double()


def percent(kept: Tensor, wanted: Tensor) -> Tensor:
    return 100.0 * (wanted.sum() - kept.sum()) / wanted.sum().clamp(min=1)


def balance(mask_SE: Tensor, name: str) -> dict[str, Tensor]:
    counts = mask_SE.sum(0)
    shares = sorted((100.0 * counts / mask_SE.sum().clamp(min=1)).tolist(), reverse=True)
    fifth = max(math.ceil(0.2 * len(shares)), 1)
    return {
        f"{name}_balance_top": torch.tensor(sum(shares[:fifth])),
        f"{name}_balance_bottom": torch.tensor(sum(shares[-fifth:])),
        f"unused_{name}_count": (counts == 0).sum(),
    }


def expected_gating(
    logits_SE: Tensor,
    gating: Gating,
    *,
    training: bool = False,
    padding_S: Tensor | None = None,
    uniform_S: Tensor | None = None,
    noise_SE: Tensor | None = None,
) -> Expected:
    """Gating with one-hot masks and running sums; draws are handed in."""
    logits_SE = logits_SE.double()
    num_tokens, num_experts = logits_SE.shape
    real_S = torch.ones(num_tokens).double() if padding_S is None else (~padding_S).double()
    count = int(real_S.sum())
    if not training and gating.eval_capacity_fraction > 0:
        capacity = math.ceil(gating.eval_capacity_fraction * count)
    else:
        capacity = gating.top_k * math.ceil(count / num_experts)
    eps = torch.finfo(torch.float64).eps
    probs_SE = logits_SE.softmax(-1)
    mask1 = one_hot(logits_SE.argmax(-1), num_experts)
    masks = [mask1]
    if gating.top_k == 2:
        others = logits_SE if noise_SE is None else logits_SE + noise_SE
        masks.append(one_hot((others - 1e30 * mask1).argmax(-1), num_experts))
        if num_experts == 1:
            masks[1] = mask1.clone()
    gates = [(probs_SE * mask).sum(-1) for mask in masks]
    if gating.top_k == 2 and gating.normalize_before_dropping:
        total = (gates[0] + gates[1]).clamp(min=eps)
        gates = [gate / total for gate in gates]
    masks = [mask * real_S[:, None] for mask in masks]
    chosen = [mask.clone() for mask in masks]
    if gating.top_k == 2 and gating.second_expert == "random":
        uniform_S = torch.full((num_tokens,), 0.5) if uniform_S is None else uniform_S
        masks[1] = masks[1] * (2 * gates[1] > uniform_S)[:, None]
    stats = {
        name: value
        for k, mask in enumerate(chosen, 1)
        for name, value in balance(mask, f"expert{k}").items()
    }
    wanted = [mask.clone() for mask in masks]
    combine = torch.zeros(num_tokens, num_experts, max(capacity, 1), dtype=torch.float64)
    places = [mask.cumsum(0) - mask for mask in masks]
    if gating.top_k == 2:
        places[1] = places[1] + masks[0].sum(0, keepdim=True)
    masks = [mask * (place < capacity) for mask, place in zip(masks, places, strict=True)]
    if gating.top_k == 2:
        for k in (0, 1):
            stats[f"overflow_expert{k + 1}"] = percent(masks[k], wanted[k])
    gates = [gate * mask.sum(-1) for gate, mask in zip(gates, masks, strict=True)]
    if gating.top_k == 2 and not gating.normalize_before_dropping:
        total = (gates[0] + gates[1]).clamp(min=eps)
        gates = [gate / total for gate in gates]
    for gate, mask, place in zip(gates, masks, places, strict=True):
        place_S = (place * mask).sum(-1).long()
        slots = one_hot(place_S, combine.shape[2])
        combine = combine + torch.einsum("s,se,sc->sec", gate, mask, slots)
    count = max(count, 1)
    mean_E = (probs_SE * real_S[:, None]).sum(0) / count
    share_E = chosen[0].sum(0) / count
    entropy_S = -(probs_SE * probs_SE.clamp(min=1e-300).log()).sum(-1)
    stats["entropy_gating"] = (entropy_S * real_S).sum() / count
    load = sum(wanted).sum(0)
    stats["expert_load"] = load / load.sum().clamp(min=1)
    return Expected(combine, num_experts**2 * (mean_E * share_E).mean(), stats)


def expected_experts(experts: nn.Module, x_ECD: Tensor) -> Tensor:
    """Each expert's places through its own feed-forward layer."""
    outputs = []
    for e, x_CD in enumerate(x_ECD):
        h = experts.activation(x_CD @ experts.fc1_weight[e].T + experts.fc1_bias[e])
        norm = experts.inner_norm
        if norm is not None:
            if norm.bias is None:
                h = h / ((h**2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight[e]
            else:
                centred = h - h.mean(-1, keepdim=True)
                deviation = ((centred**2).mean(-1, keepdim=True) + norm.eps).sqrt()
                h = centred / deviation * norm.weight[e] + norm.bias[e]
        outputs.append(h @ experts.fc2_weight[e].T + experts.fc2_bias[e])
    return torch.stack(outputs)


def expected_layer(
    layer: MoELayer, x_BTD: Tensor, padding_BT: Tensor | None = None, **draws: Any
) -> tuple[Tensor, Expected]:
    """The whole layer through dense dispatch and combine tensors."""
    x = x_BTD.transpose(0, 1) if layer.time_major else x_BTD
    padding = padding_BT if layer.mask_padding else None
    if padding is not None:
        padding = (padding.t() if layer.time_major else padding).reshape(-1)
    x_SD = x.reshape(-1, x.shape[-1])
    logits_SE = layer.router.gate(x_SD)
    expected = expected_gating(
        logits_SE, layer.router.gating, training=layer.training, padding_S=padding, **draws
    )
    dispatch_SEC = (expected.combine_SEC.detach() > 0).to(x.dtype)
    places_ECD = torch.einsum("sec,sd->ecd", dispatch_SEC, x_SD)
    outputs_ECD = expected_experts(layer.experts, places_ECD)
    combine_SEC = expected.combine_SEC.to(x.dtype)
    y_SD = torch.einsum("sec,ecd->sd", combine_SEC, outputs_ECD)
    y = y_SD.view(x.shape)
    return (y.transpose(0, 1) if layer.time_major else y), expected


@pytest.fixture(scope="session")
def reference_gating() -> Callable[..., Expected]:
    return expected_gating


@pytest.fixture(scope="session")
def reference_layer() -> Callable[..., tuple[Tensor, Expected]]:
    return expected_layer


@pytest.fixture(scope="session")
def make_layer() -> Callable[..., MoELayer]:
    """A small layer in float64 with every parameter in use."""

    def make(
        num_experts: int = 4,
        *,
        gate: str = "linear",
        norm: str | None = None,
        mask_padding: bool = True,
        time_major: bool = False,
        dtype: torch.dtype = torch.float64,
        rates: tuple[float, float] = (0.0, 0.0),
        mesh: DeviceMesh | None = None,
        **rules: Any,
    ) -> MoELayer:
        inner, placement = None, ExpertPlacement(num_experts, mesh)
        if norm is not None:
            inner = StackedNorm(placement, FFN, eps=1e-5, rms=norm == "rms_norm")
        experts = Experts(
            placement,
            DIM,
            FFN,
            init=ROUGH_FFN,
            activation=torch.nn.functional.gelu,
            activation_dropout=rates[0],
            dropout=rates[1],
            inner_norm=inner,
        )
        router = Router(GATES[gate](DIM, num_experts, init=ROUGH.weight), Gating(**rules))
        layer = MoELayer(router, experts, mask_padding=mask_padding, time_major=time_major)
        initialize(layer, 3)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in layer.parameters():
                whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                whole = whole + 0.1 * torch.randn(parameter.shape, generator=generator)
                fill(parameter, whole)
        return layer.to(dtype)

    return make
