import pytest
import torch
from torch import nn

from scalerun.dataclass.errors import ConfigError
from scalerun.optim.param_groups import build_param_groups, freeze


def groups(model, **options):
    made = build_param_groups(dict(model.named_parameters()), weight_decay=0.1, **options)
    return {name: g for g in made for name in g["names"]}


def test_biases_and_norms_do_not_decay_unless_asked(model):
    decay = {name: g["weight_decay"] for name, g in groups(model).items()}
    assert decay == {
        "embed.weight": 0.1,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "out.weight": 0.1,
        "out.bias": 0.0,
    }
    assert {g["weight_decay"] for g in groups(model, decay_all=True).values()} == {0.1}


def test_excluded_names_never_decay(model):
    found = groups(model, decay_all=True, decay_exclude=["embed.*"])
    assert found["embed.weight"]["weight_decay"] == 0.0
    assert found["norm.bias"]["weight_decay"] == 0.1


def test_the_first_matching_pattern_scales_the_rate(model):
    found = groups(model, lr_scale={"out.w*": 0.5, "out.*": 2.0})
    scales = {name: g["lr_scale"] for name, g in found.items()}
    assert scales["out.weight"] == 0.5
    assert scales["out.bias"] == 2.0
    assert scales["embed.weight"] == 1.0


def test_every_parameter_is_in_one_group(model):
    made = build_param_groups(
        dict(model.named_parameters()), weight_decay=0.1, lr_scale={"*.bias": 3.0}
    )
    params = [param for g in made for param in g["params"]]
    assert len(params) == len({id(param) for param in params}) == len(list(model.parameters()))
    assert all(g["params"] for g in made)


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--weight-decay-exclude", {"decay_exclude": ["*.embeed"]}),
        ("--lr-scale", {"lr_scale": {"*.embeed": 1.0}}),
    ],
)
def test_a_pattern_without_a_match_is_refused(flag, options):
    params = {"embed.weight": nn.Parameter(torch.zeros(1))}
    with pytest.raises(ConfigError, match=rf"{flag} has '\*.embeed', which matches no parameter"):
        build_param_groups(params, weight_decay=0.1, **options)


def test_stacked_vectors_of_experts_decay_as_little_as_single_ones():
    parameters = {
        "layers.0.ffn.experts.fc1_weight": nn.Parameter(torch.zeros(4, 3, 2)),
        "layers.0.ffn.experts.fc1_bias": nn.Parameter(torch.zeros(4, 3)),
        "layers.0.ffn.experts.inner_norm.weight": nn.Parameter(torch.zeros(4, 3)),
        "layers.0.ffn.router.gate.expert_rows": nn.Parameter(torch.zeros(4, 3)),
    }
    made = build_param_groups(parameters, weight_decay=0.1)
    decay = {name: g["weight_decay"] for g in made for name in g["names"]}
    assert list(decay.values()) == [0.1, 0.1, 0.0, 0.0]
    assert not any(decay[name] for name in decay if "bias" in name or "norm" in name)


def test_frozen_parameters_are_those_whose_names_match(model):
    freeze(model.named_parameters(), ["*.bias", "embed.*"])
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained == {"norm.weight", "out.weight"}
    with pytest.raises(ConfigError, match=r"--freeze-params has 'none\.\*', which"):
        freeze(model.named_parameters(), ["none.*"])
