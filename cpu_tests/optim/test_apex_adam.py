import math
import sys
import types

import pytest
import torch

from scalerun.dataclass.errors import ConfigError
from scalerun.optim.adam import AdamConfig

LR = 0.02


def config(**settings):
    return AdamConfig(adam_betas=[0.8, 0.95], adam_eps=1e-6, weight_decay=0.1, **settings)


def test_apex_is_asked_for_but_not_there(build, monkeypatch):
    for missing in ({"apex": None}, {"apex": types.ModuleType("apex"), "apex.optimizers": None}):
        with monkeypatch.context() as patch:
            for name, module in missing.items():
                patch.setitem(sys.modules, name, module)
            with pytest.raises(ConfigError, match=r"needs NVIDIA's apex.*another product"):
                build(AdamConfig(adam_implementation="apex"))


class FakeFusedAdam(torch.optim.Optimizer):
    """apex's bookkeeping: moments per parameter, the step count per group."""

    def __init__(self, params, lr, betas, eps, adam_w_mode, bias_correction):
        assert adam_w_mode
        assert bias_correction
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2)
                size = group["lr"] / (1 - beta1 ** group["step"])
                root = state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2 ** group["step"])
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.data.addcdiv_(state["exp_avg"], root + group["eps"], value=-size)


@pytest.fixture
def fake_apex(monkeypatch):
    optimizers = types.ModuleType("apex.optimizers")
    optimizers.FusedAdam = FakeFusedAdam
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)


def test_apex_refuses_a_model_on_the_cpu(build, fake_apex):
    with pytest.raises(ConfigError, match="runs on CUDA devices only, and the model is on cpu"):
        build(AdamConfig(adam_implementation="apex"))


def test_apex_and_torch_can_take_over_from_each_other(
    build, set_grads, assert_same_params, fake_apex, monkeypatch
):
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    kinds = [config(), config(adam_implementation="apex")]
    straight, reference = build(kinds[0], lr=LR)
    first, second = build(kinds[0], lr=LR), build(kinds[1], lr=LR)
    for before, after in ((first, second), (second, first)):
        own, optimizer = before
        for step in range(2):
            set_grads(own, step)
            optimizer.step()
        after[0].load_state_dict(own.state_dict())
        after[1].load_state_dict(optimizer.state_dict())
    for _ in range(2):
        for step in range(2):
            set_grads(straight, step)
            reference.step()
    assert_same_params(first[0], straight, rtol=1e-6, atol=1e-7)
    steps = {float(t) for name, t in first[1].state_dict().items() if name.endswith(".step")}
    assert steps == {4.0}
