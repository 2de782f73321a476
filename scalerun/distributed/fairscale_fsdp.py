"""Shards a model over ranks with fairscale's FullyShardedDataParallel, where it is installed.

fairscale cuts each flattened parameter into equal pieces. Where the ranks divide the first
dimension these are the rows that DTensors hold on ``dp_shard``, so at rest the model has DTensors
over fairscale's own memory: optimizer, clipping, averages and checkpoints are those of every other
backend. Fairscale's parameters are in the model while a batch is computed, and nowhere else.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from scalerun.dataclass.errors import ConfigError
from scalerun.distributed.gradient_sum import GradientSum

INSTEAD = "give --ddp-backend fully_sharded"


def check_fairscale(device: torch.device) -> None:
    """Refuse to go on where fairscale cannot.

    Raises:
        ConfigError: it is not installed, or the device is no GPU.
    """
    if device.type != "cuda":
        raise ConfigError(
            "--ddp-backend fairscale needs a GPU, as fairscale's sharding moves data on CUDA "
            f"streams; {INSTEAD}"
        )
    if importlib.util.find_spec("fairscale") is None:
        raise ConfigError(
            "--ddp-backend fairscale needs fairscale, which is not installed; run 'pip install "
            f"--no-build-isolation fairscale==0.4.13' after torch's installation, or {INSTEAD}"
        )


def wrap_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    units: Sequence[nn.Module],
    reshard_after_forward: bool,
    device: torch.device,
) -> GradientSum:
    """Shard in place a model whose weights are drawn; every rank calls it.

    Args:
        mesh: one axis, of all ranks.
        units: modules that are gathered and freed as one.
        reshard_after_forward: free their parameters until the backward pass.
        device: that the model is on.

    Returns:
        How its gradients are summed.

    Raises:
        ConfigError: the ranks cannot share a parameter.
    """
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    _check_rows(model, mesh.size())
    slots = [
        (module, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None
    ]
    shapes = {id(param): param.shape for _, _, param in slots}
    for _, _, param in slots:
        # fairscale empties the memory of the whole parameter, which others may share.
        param.data = param.data.clone()

    def wrapped(module: nn.Module, inner: Sequence[nn.Module] = ()) -> nn.Module:
        fsdp = FullyShardedDataParallel(
            _Inside(module, inner),
            process_group=mesh.get_group(),
            reshard_after_forward=reshard_after_forward,
            flatten_parameters=False,
            compute_device=device,
            clear_autocast_cache=True,
        )
        return cast(nn.Module, fsdp)

    parts = [wrapped(unit) for unit in units]
    root = wrapped(model, parts)
    # The loss is divided by the targets of the whole update, so ranks add up.
    cast(Any, root).set_gradient_divide_factors(1.0, 1.0, recursive=True)
    at_rest = {id(param): _rows_of(param, shapes[id(param)], mesh) for _, _, param in slots}
    state = _Residence([_Slot(*slot, at_rest[id(slot[2])]) for slot in slots])
    for module, fsdp in zip(units, parts, strict=True):
        _route(module, fsdp)
    _route(model, root, state.computing)
    state.rest()
    return FairscaleSum(state)


@dataclass(frozen=True)
class _Slot:
    """A place in the model, and the two tensors that take turns there."""

    module: nn.Module
    name: str
    computing: nn.Parameter
    """Fairscale's: gathered for a module's passes, else this rank's piece, flat."""
    resting: nn.Parameter
    """A DTensor whose local part is that piece."""


class _Residence:
    """Which of the two is in the model."""

    def __init__(self, slots: Sequence[_Slot]) -> None:
        self.slots = slots
        self._depth = 0

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Fairscale's parameters are in the model, as long as anybody needs them."""
        if self._depth == 0:
            for slot in self.slots:
                slot.module._parameters[slot.name] = slot.computing
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.rest()

    def rest(self) -> None:
        """DTensors are in the model."""
        for slot in self.slots:
            slot.module._parameters[slot.name] = slot.resting


class FairscaleSum(GradientSum):
    """fairscale reduces and scatters the gradients of every batch, and adds up its pieces."""

    def __init__(self, state: _Residence) -> None:
        self._state = state
        self._begun = False

    @contextlib.contextmanager
    def batch(self, *, last: bool) -> Iterator[None]:
        if not self._begun:
            self._drop()  # those of a pass outside of an update
        self._begun = not last
        with self._state.computing():
            yield

    def finish(self) -> None:
        for slot in self._state.slots:
            if slot.computing.grad is not None:
                part = slot.computing.grad
                slot.resting.grad = _on_mesh_of(cast(DTensor, slot.resting), part)
        self._drop()

    def _drop(self) -> None:
        for slot in self._state.slots:
            slot.computing.grad = None


class _Inside(nn.Module):
    """Calls a module's own forward, whose place a call of fairscale's wrapper takes.

    Args:
        module: whose parameters are sharded.
        inner: wrappers of modules inside of it, among which fairscale looks for its own.
    """

    def __init__(self, module: nn.Module, inner: Sequence[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


def _route(
    module: nn.Module,
    wrapper: nn.Module,
    context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Let a module's forward pass go through its wrapper, without a new module in the tree."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        with context():
            return wrapper(*args, **kwargs)

    module.forward = forward


@torch.no_grad()
def _rows_of(param: nn.Parameter, shape: torch.Size, mesh: DeviceMesh) -> nn.Parameter:
    """A DTensor of the whole shape over the memory of a flat piece of it."""
    whole = torch.empty(shape, device="meta")
    rows = DTensor.from_local(
        param.data.view(shape[0] // mesh.size(), *shape[1:]),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return nn.Parameter(rows, requires_grad=param.requires_grad)


@torch.no_grad()
def _on_mesh_of(like: DTensor, part: Tensor) -> DTensor:
    return DTensor.from_local(
        part.view_as(like.to_local()),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _check_rows(model: nn.Module, ranks: int) -> None:
    for name, param in model.named_parameters():
        if param.ndim == 0 or param.shape[0] % ranks:
            raise ConfigError(
                f"--ddp-backend fairscale cannot spread {name} {tuple(param.shape)} over {ranks} "
                f"ranks, which do not divide its first dimension; {INSTEAD}"
            )
