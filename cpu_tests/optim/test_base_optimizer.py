import pytest
import torch
from torch import nn

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.optim.adam import AdamConfig
from scalerun.optim.base_optimizer import OPTIMIZER_REGISTRY, build_optimizer
from scalerun.optim.sgd import SGDConfig

CONFIGS = [AdamConfig(weight_decay=0.1), SGDConfig(momentum=0.9, weight_decay=0.1), SGDConfig()]


def test_both_optimizers_are_registered():
    assert {"adam", "sgd"} <= set(OPTIMIZER_REGISTRY.names())


@pytest.mark.parametrize("cfg", CONFIGS)
def test_state_taken_before_the_first_step_changes_nothing(
    build, set_grads, assert_same_params, cfg
):
    """So a fresh optimizer can serve as the template that a checkpoint is loaded into."""
    (touched, a), (plain, b) = build(cfg), build(cfg)
    a.state_dict()
    for step in range(3):
        for model, optimizer in ((touched, a), (plain, b)):
            set_grads(model, step)
            optimizer.step()
    assert_same_params(touched, plain, rtol=0, atol=0)
    assert a.state_dict().keys() == b.state_dict().keys()


@pytest.mark.parametrize("cfg", CONFIGS)
def test_a_loaded_state_continues_to_the_bit(build, set_grads, assert_same_params, cfg):
    straight, a = build(cfg)
    for step in range(2):
        set_grads(straight, step)
        a.step()
    resumed, b = build(cfg)
    resumed.load_state_dict(straight.state_dict())
    b.load_state_dict({name: tensor.clone() for name, tensor in a.state_dict().items()})
    for step in range(2, 4):
        for model, optimizer in ((straight, a), (resumed, b)):
            set_grads(model, step)
            optimizer.step()
    assert_same_params(straight, resumed, rtol=0, atol=0)


def test_the_state_does_not_depend_on_the_grouping(build, set_grads, assert_same_params):
    one, a = build(AdamConfig())
    set_grads(one, 0)
    a.step()
    other, b = build(AdamConfig(weight_decay_all=True, lr_scale={"out.*": 1.0, "*": 1.0}))
    other.load_state_dict(one.state_dict())
    b.load_state_dict(a.state_dict())
    for model, optimizer in ((one, a), (other, b)):
        set_grads(model, 1)
        optimizer.step()
    assert_same_params(one, other, rtol=0, atol=0)


def test_each_state_tensor_is_named_after_its_parameter(build):
    model, optimizer = build(AdamConfig())
    kinds = {"step": (), "exp_avg": None, "exp_avg_sq": None}
    expected = {
        f"{name}.{kind}": tuple(param.shape) if shape is None else shape
        for name, param in model.named_parameters()
        for kind, shape in kinds.items()
    }
    assert {name: tuple(t.shape) for name, t in optimizer.state_dict().items()} == expected


def test_a_state_that_does_not_fit_is_refused(build):
    _, optimizer = build(AdamConfig())
    state = optimizer.state_dict()
    with pytest.raises(UserError, match=r"lacks embed\.weight\.exp_avg; .*--reset-optimizer"):
        optimizer.load_state_dict({k: v for k, v in state.items() if k != "embed.weight.exp_avg"})
    with pytest.raises(UserError, match=r"unexpected a\.momentum_buffer"):
        optimizer.load_state_dict(state | {"a.momentum_buffer": torch.zeros(1)})
    with pytest.raises(UserError, match=r"out\.bias\.exp_avg has shape \(4,\) and not \(3,\)"):
        optimizer.load_state_dict(state | {"out.bias.exp_avg": torch.zeros(4)})


def test_the_rate_reaches_every_group_times_its_scale(build):
    _, optimizer = build(AdamConfig(lr_scale={"out.*": 0.5}))
    optimizer.set_lr(0.3)
    assert optimizer.get_lr() == 0.3
    assert {g["lr"] for g in optimizer.param_groups} == {0.3, 0.15}


def test_gradients_are_freed_and_multiplied(build, set_grads):
    model, optimizer = build(SGDConfig())
    set_grads(model, 0)
    before = [param.grad.clone() for param in model.parameters()]
    optimizer.multiply_grads(0.25)
    for grad, param in zip(before, model.parameters(), strict=True):
        assert torch.equal(param.grad, grad * 0.25)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    optimizer.multiply_grads(2.0)
    assert optimizer.clip_grad_norm(1.0).total == 0


def test_frozen_parameters_are_left_out(model):
    model.embed.weight.requires_grad_(False)
    optimizer = build_optimizer(AdamConfig(), model.named_parameters())
    assert not any(name.startswith("embed") for name in optimizer.state_dict())
    with pytest.raises(ConfigError, match="no parameter to train"):
        build_optimizer(AdamConfig(), nn.Identity().named_parameters())


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (AdamConfig(weight_decay=-1.0), "--weight-decay is -1"),
        (AdamConfig(weight_decay=float("nan")), "--weight-decay is nan"),
        (AdamConfig(lr_scale={"*": -2.0}), "--lr-scale gives '\\*' -2"),
        (AdamConfig(adam_betas=[0.9]), "--adam-betas is \\[0.9\\]; give two numbers"),
        (AdamConfig(adam_betas=[0.9, 1.0]), "--adam-betas"),
        (AdamConfig(adam_eps=0.0), "--adam-eps is 0"),
        (SGDConfig(momentum=1.0), "--momentum is 1"),
        (SGDConfig(nesterov=True), "--nesterov needs a --momentum"),
    ],
)
def test_settings_out_of_range_are_refused(cfg, message):
    with pytest.raises(ConfigError, match=message):
        cfg.validate()
