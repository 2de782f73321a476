from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalerun.modules.attention import Attention, AttentionInit
from scalerun.modules.block_context import BlockContext
from scalerun.modules.init import LinearInit
from scalerun.modules.joined_linear import joined, lay_together
from scalerun.modules.linear import Linear


@pytest.fixture
def layers(attention_init: AttentionInit) -> list[Linear]:
    return make_layers(attention_init.q)


def make_layers(init: LinearInit, *, bias: bool = True) -> list[Linear]:
    layers = [Linear(3, rows, init=init, bias=bias) for rows in (2, 4, 1)]
    for parameter in nn.ModuleList(layers).parameters():
        nn.init.normal_(parameter)
    return layers


def product(layers: list[Linear], x: Tensor) -> Tensor:
    found = joined(layers)
    assert found is not None
    return F.linear(x, *found)


def test_the_joined_product_is_that_of_each_layer(layers: list[Linear]) -> None:
    x = torch.randn(5, 3)
    before = [layer(x) for layer in layers]
    assert joined(layers) is None
    lay_together(layers)
    assert all(map(torch.equal, before, [layer(x) for layer in layers]))
    torch.testing.assert_close(product(layers, x), torch.cat(before, 1))


def test_what_is_written_into_a_parameter_is_seen(layers: list[Linear]) -> None:
    lay_together(layers)
    weight_and_bias = joined(layers)
    assert weight_and_bias is not None
    optimizer = torch.optim.SGD(nn.ModuleList(layers).parameters(), lr=0.5)
    x = torch.randn(5, 3)
    sum(layer(x).sum() for layer in layers).backward()
    optimizer.step()
    expected = torch.cat([layer(x) for layer in layers], 1)
    torch.testing.assert_close(F.linear(x, *weight_and_bias), expected)
    assert not any(tensor.requires_grad for tensor in weight_and_bias)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parameters_that_moved_away_are_not_joined(
    index: int, name: str, layers: list[Linear]
) -> None:
    lay_together(layers)
    setattr(layers[index], name, nn.Parameter(getattr(layers[index], name).detach().clone()))
    assert joined(layers) is None
    lay_together(layers)
    assert joined(layers) is not None


def test_only_plain_layers_with_memory_of_their_own_are_joined(
    layers: list[Linear], attention_init: AttentionInit
) -> None:
    without_bias = make_layers(attention_init.q, bias=False)
    on_meta = [layer.to("meta") for layer in make_layers(attention_init.q)]
    hooked = [*layers[:2], nn.utils.parametrizations.weight_norm(layers[2])]
    for others in (without_bias, on_meta, hooked):
        lay_together(others)
        assert joined(others) is None


@pytest.mark.parametrize("move", ["to", "to_empty", "deepcopy"])
def test_attention_joins_its_projections_wherever_they_go(
    move: str, attention_init: AttentionInit, ready: Callable[[nn.Module], nn.Module]
) -> None:
    with torch.device("meta"):
        unset = Attention(8, 2, init=attention_init)
    attention = ready(unset.to_empty(device="cpu"))
    if move == "to":
        attention = attention.to(torch.float64)
    if move == "deepcopy":
        attention = copy.deepcopy(attention).to("cpu")
    assert isinstance(attention, Attention)
    assert joined(attention.projections()) is not None
    x_BTD = torch.randn(2, 3, 8, dtype=attention.q_proj.weight.dtype)
    alone = attention.project(x_BTD, BlockContext())
    with torch.no_grad():
        context = BlockContext(state=attention.init_state(2, 3))
        together = attention.project(x_BTD, context)
    torch.testing.assert_close(together, alone)
    assert all(part.requires_grad for part in attention.project(x_BTD, context))
