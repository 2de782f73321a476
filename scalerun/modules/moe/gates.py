"""Gates: how well each expert suits each token.

S tokens, D model width, R routing width, E experts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalerun.modules.constraint import Constrained
from scalerun.modules.init import Initializer

XMOE_WIDTH = 16
"""Routing width of TorchScale's X-MoE, whatever the number of experts."""
XMOE_GAIN = 0.32
XMOE_NORM = 1.5
SMALLEST_NORM = 1e-4
FIRST_TEMPERATURE = 0.3


class Gate(nn.Module, ABC):
    """Logits of all experts for each token: (S, D) -> (S, E).

    Args:
        num_experts: E.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    @abstractmethod
    def forward(self, x_SD: Tensor) -> Tensor: ...

    def num_active_weights(self) -> int:
        """Weights that one token is multiplied with."""
        return sum(p.numel() for p in self.parameters() if p.ndim == 2)


class LinearGate(Gate):
    """``x W^T`` without bias, as in GShard (Lepikhin et al. 2020, arXiv:2006.16668).

    Args:
        dim: D.
        num_experts: E.
        init: how W (E, D) starts.
    """

    def __init__(self, dim: int, num_experts: int, *, init: Initializer) -> None:
        super().__init__(num_experts)
        self.init = init
        self.weight = nn.Parameter(torch.empty(num_experts, dim))

    def initializers(self) -> dict[str, Initializer]:
        return {"weight": self.init}

    def forward(self, x_SD: Tensor) -> Tensor:
        return F.linear(x_SD, self.weight.to(x_SD.dtype))


class XMoEGate(Gate, Constrained):
    """The gate of TorchScale's X-MoE: ``r . w / |w|`` with ``r`` the token at a width of 16.

    It differs from the paper (Chi et al. 2022, arXiv:2204.09179): r is not normalised and there is
    no temperature; :class:`CosineGate` is the paper's. Training keeps the stored rows w at norm
    1.5, which changes no logit but sets the scale of their gradient. TorchScale does so in every
    forward pass; here it is a constraint, with the same numbers.

    Args:
        dim: D.
        num_experts: E.
        init: how the reduction (16, D) starts; the rows start orthogonal.
    """

    def __init__(self, dim: int, num_experts: int, *, init: Initializer) -> None:
        super().__init__(num_experts)
        self.init = init
        self.reduction = nn.Parameter(torch.empty(XMOE_WIDTH, dim))
        self.expert_rows = nn.Parameter(torch.empty(num_experts, XMOE_WIDTH))

    def initializers(self) -> dict[str, Initializer]:
        return {"reduction": self.init, "expert_rows": orthogonal(XMOE_GAIN)}

    def forward(self, x_SD: Tensor) -> Tensor:
        reduced_SR = F.linear(x_SD, self.reduction.to(x_SD.dtype))
        rows_ER = self.expert_rows.to(x_SD.dtype)
        rows_ER = rows_ER / rows_ER.norm(dim=-1, keepdim=True).clamp(min=SMALLEST_NORM)
        return F.linear(reduced_SR, rows_ER)

    @torch.no_grad()
    def constrain(self) -> None:
        """Bring the stored rows to norm 1.5; rows that have it keep their bits."""
        norm_E1 = self.expert_rows.norm(dim=-1, keepdim=True).clamp(min=SMALLEST_NORM)
        factor_E1 = XMOE_NORM / norm_E1
        self.expert_rows.mul_(torch.where((factor_E1 - 1.0).abs() > 1e-6, factor_E1, 1.0))


class CosineGate(Gate):
    """``cos(r, w) / temperature`` with a learnable temperature, r the token at a smaller width.

    Source: Chi et al. 2022, arXiv:2204.09179, section 3: the width is half the number of experts
    (here 2 at least) and the temperature starts at 0.3.

    Args:
        dim: D.
        num_experts: E.
        init: how the reduction (R, D) starts; the rows start orthogonal.
    """

    def __init__(self, dim: int, num_experts: int, *, init: Initializer) -> None:
        super().__init__(num_experts)
        self.init = init
        width = max(num_experts // 2, 2)
        self.reduction = nn.Parameter(torch.empty(width, dim))
        self.expert_rows = nn.Parameter(torch.empty(num_experts, width))
        self.log_temperature = nn.Parameter(torch.empty(1))

    def initializers(self) -> dict[str, Initializer]:
        return {
            "reduction": self.init,
            "expert_rows": orthogonal(1.0),
            "log_temperature": _start_temperature,
        }

    def forward(self, x_SD: Tensor) -> Tensor:
        reduced_SR = F.linear(x_SD, self.reduction.to(x_SD.dtype))
        cosines_SE = F.linear(
            F.normalize(reduced_SR, dim=-1, eps=SMALLEST_NORM),
            F.normalize(self.expert_rows.to(x_SD.dtype), dim=-1, eps=SMALLEST_NORM),
        )
        return cosines_SE * torch.exp(-self.log_temperature)


GATES: dict[str, type[LinearGate] | type[XMoEGate] | type[CosineGate]] = {
    "linear": LinearGate,
    "xmoe": XMoEGate,
    "xmoe_cosine": CosineGate,
}


def orthogonal(gain: float) -> Initializer:
    """Orthonormal rows, or columns where there are fewer, times ``gain`` (arXiv:1312.6120)."""

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        nn.init.orthogonal_(tensor, gain, generator=generator)

    return fill


def _start_temperature(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.fill_(math.log(FIRST_TEMPERATURE))
