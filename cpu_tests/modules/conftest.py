from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from scalerun.modules.attention import Attention, AttentionInit
from scalerun.modules.feed_forward import FeedForwardInit
from scalerun.modules.init import LinearInit, initialize, normal

ROUGH = LinearInit(normal(0.4), normal(0.3))


@pytest.fixture
def attention_init() -> AttentionInit:
    return AttentionInit(q=ROUGH, k=ROUGH, v=ROUGH, out=ROUGH)


@pytest.fixture
def ffn_init() -> FeedForwardInit:
    return FeedForwardInit(fc1=ROUGH, fc2=ROUGH, gate=ROUGH)


@pytest.fixture
def ready() -> Callable[[nn.Module], nn.Module]:
    """Draws a module's weights, roughens its norms, and makes it float64."""

    def prepare(module: nn.Module) -> nn.Module:
        initialize(module, 3)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        return module.double()

    return prepare


@pytest.fixture
def attention(attention_init: AttentionInit, ready: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return ready(Attention(8, 2, init=attention_init))


@pytest.fixture
def x_BTD() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).double()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
