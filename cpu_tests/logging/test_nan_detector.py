from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cpu_tests.world import run_world
from scalerun.logging.nan_detector import NanDetector, describe_values, nonfinite_gradients


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Root(nn.Module):
    """Its gradient at 0 is infinite, its value is not."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach()).sqrt()


@dataclass
class Output:
    logits: Tensor


class Model(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Identity(), middle), nn.Identity()])
        self.last = nn.Linear(2, 2)
        nn.init.constant_(self.first.weight, -1.0)
        nn.init.zeros_(self.first.bias)

    def forward(self, x: Tensor) -> Output:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) + x
        return Output(self.last(x))


def run(model: nn.Module, scale: float = 1.0) -> NanDetector:
    with NanDetector(model) as detector:
        (model(torch.ones(1, 2)).logits.sum() * scale).backward()
    return detector


def test_a_healthy_model_has_no_finding() -> None:
    detector = run(Model(nn.Identity()))
    assert detector.finding is None
    assert detector.describe() == "no module gave a non-finite output or gradient"


def test_the_innermost_module_with_a_bad_output_is_named() -> None:
    finding = run(Model(Log())).finding
    assert finding is not None
    assert (finding.module, finding.module_type, finding.what) == ("blocks.0.1", "Log", "output")
    assert "2 NaN" in finding.values
    assert "from -2 to -2" in finding.inputs
    assert str(finding).startswith("the output of blocks.0.1 (Log) is the first that is not finite")


def test_the_module_whose_backward_breaks_is_named() -> None:
    detector = run(Model(Root()))
    finding = detector.finding
    assert finding is not None
    assert (finding.module, finding.what) == ("blocks.0.1", "gradient of the input")
    assert "first.weight" in detector.describe()


def test_a_bad_weight_is_named() -> None:
    model = Model(nn.Identity())
    with torch.no_grad():
        model.last.bias[0] = torch.inf
    finding = run(model).finding
    assert finding is not None
    assert finding.module == "last"
    assert str(finding).endswith("not finite among its weights: bias")


def test_a_gradient_that_arrives_broken_is_that_of_the_last_output() -> None:
    finding = run(Model(nn.Identity()), scale=torch.inf).finding
    assert finding is not None
    assert (finding.module, finding.what) == ("last", "gradient of the output")


def test_gradients_are_those_of_a_run_without_it_and_hooks_are_gone() -> None:
    model = Model(nn.GELU())
    run(model)
    watched = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(torch.ones(1, 2)).logits.sum().backward()
    for gradient, parameter in zip(watched, model.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)  # type: ignore[arg-type]
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_only_five_parameters_are_listed() -> None:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    assert len(nonfinite_gradients(model.named_parameters())) == 8
    assert NanDetector(model).describe().endswith("1.weight, 1.bias, 2.weight and 3 more")


def test_values_are_described_by_kind_count_and_range() -> None:
    tensor = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.inf, 1.0, -2.0])
    assert describe_values(tensor) == "(6,) with 1 NaN, 1 Inf, 2 -Inf, finite values from -2 to 1"
    assert describe_values(torch.zeros(0)) == "(0,) with no values"


def test_a_sharded_module_goes_by_the_name_of_its_own_class() -> None:
    def work(rank: int) -> str:
        model = Model(Log())
        for module in (model.first, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        with NanDetector(model) as detector:
            model(torch.full((1, 2), torch.nan))
        return detector.describe()

    (text,) = run_world(1, work)
    assert text.startswith("the output of first (Linear) is the first that is not finite")
