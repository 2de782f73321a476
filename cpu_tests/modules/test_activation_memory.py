from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from scalerun.modules.activation_memory import ActivationMemory, HostMemory, keeps
from scalerun.modules.block_context import BlockContext

HEADS, TIME, DIM = 2, 6, 8
aten = torch.ops.aten


class Layer(nn.Module):
    """Attention and a product, with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM, bias=False)
        self.calls = 0

    def forward(self, x_BTD: Tensor, context: BlockContext) -> tuple[Tensor, None]:
        self.calls += 1
        q, k, v = self.qkv(x_BTD).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x_BTD + self.out(F.dropout(F.gelu(mixed.transpose(1, 2).flatten(2)), 0.3)), None


class CountsOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name().removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def run(memory: ActivationMemory, layers: list[Layer]) -> tuple[Tensor, Tensor]:
    """Input that wants a gradient, and the output of a stack of layers."""
    start = torch.randn(3, TIME, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()
    x = start
    torch.manual_seed(5)
    for number, layer in enumerate(layers):
        x, _ = memory.run(layer, x, BlockContext(), number=number)
    return start, x


def stack(num_layers: int = 4) -> list[Layer]:
    torch.manual_seed(0)
    return [Layer() for _ in range(num_layers)]


def gradients(memory: ActivationMemory) -> list[Tensor]:
    layers = stack()
    start, x = run(memory, layers)
    torch.rand(7)  # what is drawn in between must not matter
    x.square().sum().backward()
    return [x.detach(), *(t.grad for t in (start, *nn.ModuleList(layers).parameters()))]


MEMORIES = {
    "all": ActivationMemory(recompute="all"),
    "selective": ActivationMemory(recompute="selective"),
    "every_second": ActivationMemory(recompute="all", interval=2),
    "every_third_selective": ActivationMemory(recompute="selective", interval=3),
    "offload": ActivationMemory(offload=True),
    "offload_all": ActivationMemory(recompute="all", offload=True),
    "offload_every_second": ActivationMemory(recompute="all", interval=2, offload=True),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_no_bit_of_a_gradient_depends_on_it(name: str) -> None:
    for found, expected in zip(
        gradients(MEMORIES[name]), gradients(ActivationMemory()), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("interval", "again"), [(1, [1, 1, 1, 1]), (2, [0, 1, 0, 1]), (3, [0, 0, 1, 0])]
)
@pytest.mark.parametrize("recompute", ["all", "selective"])
def test_every_nth_layer_is_run_again(recompute: str, interval: int, again: list[int]) -> None:
    layers = stack()
    _, x = run(ActivationMemory(recompute=recompute, interval=interval), layers)
    x.sum().backward()
    assert [layer.calls - 1 for layer in layers] == again


def test_without_gradients_nothing_is_kept() -> None:
    layers = stack()
    with torch.no_grad():
        _, x = run(ActivationMemory(recompute="all", offload=True), layers)
    assert not x.requires_grad
    assert [layer.calls for layer in layers] == [1] * 4


def backward_calls(memory: ActivationMemory) -> Counter[str]:
    layers = stack(1)
    _, x = run(memory, layers)
    with CountsOperators() as counted:
        x.sum().backward()
    return counted.calls


def test_selective_recomputation_repeats_no_product_and_no_attention() -> None:
    nothing = backward_calls(ActivationMemory())
    selective = backward_calls(ActivationMemory(recompute="selective"))
    everything = backward_calls(ActivationMemory(recompute="all"))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    products = ("mm", "addmm", attention)
    assert [selective[name] for name in products] == [nothing[name] for name in products]
    assert everything["addmm"] == nothing["addmm"] + 1
    assert everything[attention] == 1
    assert selective["gelu"] == 1


@pytest.mark.parametrize(("rate", "policy"), [(0.0, "MUST_SAVE"), (0.1, "PREFER_RECOMPUTE")])
def test_attention_that_draws_random_numbers_is_run_again(rate: float, policy: str) -> None:
    q = torch.zeros(1, 1, 2, 4)
    for operator in (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ):
        names = [argument.name for argument in operator._schema.arguments]
        place = names.index("dropout_p")
        by_place = [q] * place + [rate]
        assert keeps(None, operator, *by_place) == CheckpointPolicy[policy]
        assert keeps(None, operator, q, dropout_p=rate) == CheckpointPolicy[policy]


def test_products_of_activations_are_run_again() -> None:
    q = torch.zeros(1, 2, 4)
    assert keeps(None, aten.bmm.default, q, q.mT) == CheckpointPolicy.PREFER_RECOMPUTE
    assert keeps(None, aten.mm.default, q[0], q[0].T) == CheckpointPolicy.MUST_SAVE


def test_a_vector_times_a_matrix_may_be_part_of_a_layer() -> None:
    class WithVector(Layer):
        def forward(self, x_BTD: Tensor, context: BlockContext) -> tuple[Tensor, None]:
            y_BTD, _ = super().forward(x_BTD, context)
            return y_BTD * (y_BTD.mean((0, 1)) @ self.out.weight), None

    def grads(memory: ActivationMemory) -> list[Tensor]:
        torch.manual_seed(0)
        layer = WithVector()
        run(memory, [layer])[1].sum().backward()
        return [p.grad for p in layer.parameters()]

    found = grads(ActivationMemory(recompute="selective"))
    assert all(map(torch.equal, found, grads(ActivationMemory())))


class Watched(HostMemory):
    """Notes what is packed."""

    def __init__(self, layer: nn.Module) -> None:
        self.copied: list[Tensor] = []
        self.left: list[Tensor] = []
        super().__init__(layer)

    def pack(self, tensor: Tensor) -> Any:
        packed = super().pack(tensor)
        (self.left if packed is tensor else self.copied).append(tensor)
        return packed


def test_activations_are_copied_and_weights_are_not() -> None:
    [layer] = stack(1)
    x = torch.randn(3, TIME, DIM, requires_grad=True)
    watched = Watched(layer)
    with watched:
        layer(x, BlockContext())
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    assert {t.untyped_storage().data_ptr() for t in watched.left} <= weights
    assert watched.left
    assert not weights & {t.untyped_storage().data_ptr() for t in watched.copied}
    assert x.data_ptr() in {t.data_ptr() for t in watched.copied}


def test_with_recomputation_the_inputs_of_layers_alone_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Watched] = []

    def watch(memory: ActivationMemory, layer: nn.Module) -> Watched:
        made.append(Watched(layer))
        return made[-1]

    monkeypatch.setattr(ActivationMemory, "place", watch)
    start, x = run(ActivationMemory(recompute="all", offload=True), stack())
    assert [[t.shape for t in watched.copied] for watched in made] == [[start.shape]] * 4
    assert torch.equal(made[0].copied[0], start)
    x.sum().backward()
    assert [len(watched.copied) for watched in made] == [1] * 4


def test_what_comes_back_is_what_was_packed() -> None:
    memory = HostMemory(nn.Linear(1, 1))
    tensor = torch.randn(4, 5, 6).transpose(0, 2)
    packed = memory.pack(tensor)
    back = memory.unpack(packed)
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()
    assert packed[1].device.type == "cpu"
    assert packed[1].data_ptr() != tensor.data_ptr()


def test_a_broadcast_value_is_not_written_out() -> None:
    broadcast = torch.randn(1, 5).expand(100, 5)
    assert HostMemory(nn.Linear(1, 1)).pack(broadcast) is broadcast
