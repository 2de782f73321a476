"""A small model with all kinds of parameters, and gradients to feed it."""

import copy

import pytest
import torch
from torch import nn

from scalerun.optim.base_optimizer import build_optimizer


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 3)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Small()


def set_grads(model, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).mul_(scale).to(param.dtype)


@pytest.fixture(name="set_grads")
def set_grads_fixture():
    return set_grads


@pytest.fixture
def build(model):
    """Build an optimizer over a copy of the model: ``build(cfg)`` -> (copy, optimizer)."""

    def build(cfg, lr=0.1):
        cfg.validate()
        own = copy.deepcopy(model)
        optimizer = build_optimizer(cfg, own.named_parameters())
        optimizer.set_lr(lr)
        return own, optimizer

    return build


def assert_same_params(one, other, **tolerance):
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            a, b.to(a.dtype), msg=lambda text, n=name: f"{n}: {text}", **tolerance
        )


@pytest.fixture(name="assert_same_params")
def assert_same_params_fixture():
    return assert_same_params
