from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from scalerun.modules.init import (
    Initializer,
    LinearInit,
    canonical_name,
    initialize,
    normal,
    ones,
    uniform,
    xavier_normal,
    xavier_uniform,
    zeros,
)
from scalerun.modules.linear import Linear

DRAW = LinearInit(normal(1.0), uniform(0.5))


class Pair(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, Linear(3, 2, init=DRAW))


def weights(model: nn.Module, seed: int) -> dict[str, Tensor]:
    initialize(model, seed)
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def test_weights_are_a_function_of_seed_and_name() -> None:
    here, there = weights(Pair(("a", "b")), 5), weights(Pair(("c", "b", "a")), 5)
    for name in here:
        assert torch.equal(here[name], there[name])
    assert not torch.equal(here["a.weight"], here["b.weight"])
    assert not torch.equal(here["a.weight"], weights(Pair(("a",)), 6)["a.weight"])


def test_weights_do_not_depend_on_the_global_generator() -> None:
    before = weights(Pair(("a",)), 5)
    torch.rand(7)
    state = torch.get_rng_state()
    after = weights(Pair(("a",)), 5)
    assert torch.equal(before["a.weight"], after["a.weight"])
    assert torch.equal(state, torch.get_rng_state())


def test_weights_do_not_depend_on_the_dtype_they_are_kept_in() -> None:
    wide, narrow = weights(Pair(("a",)), 5), weights(Pair(("a",)).bfloat16(), 5)
    assert torch.equal(wide["a.weight"].bfloat16(), narrow["a.weight"])


def test_wrappers_do_not_change_names() -> None:
    name = "layers.0._checkpoint_wrapped_module._orig_mod.mixer.q_proj.weight"
    assert canonical_name(name) == "layers.0.mixer.q_proj.weight"


def test_a_tied_parameter_is_drawn_once_under_its_first_name() -> None:
    model, alone = Pair(("a", "b")), weights(Pair(("a",)), 5)
    model.b.weight = model.a.weight
    assert torch.equal(weights(model, 5)["a.weight"], alone["a.weight"])
    assert model.b.weight is model.a.weight


def test_a_parameter_nobody_speaks_for_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"parameter 0\.weight has no initializer"):
        initialize(model, 0)


def test_an_outer_module_may_speak_for_its_children() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Linear(2, 2)
            self.ours = Linear(2, 2, init=LinearInit(ones, ones))

        def initializers(self) -> dict[str, Initializer]:
            return {"plain.weight": ones, "plain.bias": zeros, "ours.weight": zeros}

    model = Outer()
    initialize(model, 0)
    assert model.plain.weight.unique().tolist() == [1.0]
    assert model.ours.weight.unique().tolist() == [1.0]


def test_tables_are_computed_and_forgotten_ones_are_named() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.empty(3), persistent=False)

    class Filled(Table):
        def reset_buffers(self) -> None:
            self.table.copy_(torch.arange(3))

    filled = Filled()
    initialize(filled, 0)
    assert filled.table.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match=r"reset_buffers\(\)"):
        initialize(nn.Sequential(Table()), 0)


@pytest.mark.parametrize(
    ("initializer", "deviation", "bound"),
    [
        (normal(0.3), 0.3, None),
        (uniform(0.3), 0.3 / math.sqrt(3), 0.3),
        (xavier_normal(2.0), 2 * math.sqrt(2 / 700), None),
        (xavier_uniform(2.0), 2 * math.sqrt(2 / 700), 2 * math.sqrt(6 / 700)),
        (zeros, 0.0, 0.0),
    ],
    ids=["normal", "uniform", "xavier_normal", "xavier_uniform", "zeros"],
)
def test_distributions_have_their_spread(
    initializer: Initializer, deviation: float, bound: float | None
) -> None:
    drawn = torch.empty(300, 400)
    initializer(drawn, torch.Generator().manual_seed(1))
    assert drawn.std().item() == pytest.approx(deviation, rel=0.01)
    assert drawn.mean().item() == pytest.approx(0.0, abs=0.01)
    if bound is not None:
        assert drawn.abs().max().item() <= bound
