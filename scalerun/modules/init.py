"""Initial weights: a function of the seed and the parameter's name, of nothing else.

A parameter's values do not depend on the device, on the order of construction, or on the other
parameters of the model. A module states how its parameters are drawn in ``initializers()``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from scalerun.distributed.sharding import fill

Initializer = Callable[[Tensor, torch.Generator], None]
"""Fills a float32 CPU tensor in place, drawing from the generator."""

WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")


@runtime_checkable
class HasInitializers(Protocol):
    """A module that knows how its own parameters start."""

    def initializers(self) -> dict[str, Initializer]:
        """Initializer of each parameter, by its name relative to this module."""


@runtime_checkable
class HasBuffers(Protocol):
    """A module with tables that are computed, not drawn."""

    def reset_buffers(self) -> None:
        """Fill the tables, on the device they are on."""


@dataclass(frozen=True)
class LinearInit:
    """How a linear layer starts."""

    weight: Initializer
    bias: Initializer


def zeros(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill with 0."""
    tensor.zero_()


def ones(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill with 1."""
    tensor.fill_(1.0)


def normal(std: float, *, zero_row: int | None = None) -> Initializer:
    """Draw from N(0, std**2); ``zero_row`` (the padding symbol's) starts at 0."""

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, std, generator=generator)
        if zero_row is not None:
            tensor[zero_row] = 0.0

    return fill


def uniform(bound: float) -> Initializer:
    """Draw uniformly from [-bound, bound)."""

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.uniform_(-bound, bound, generator=generator)

    return fill


def xavier_uniform(gain: float = 1.0) -> Initializer:
    """Uniform with variance gain**2 * 2 / (fan_in + fan_out) (Glorot and Bengio 2010)."""

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        bound = gain * math.sqrt(6.0 / sum(tensor.shape))
        tensor.uniform_(-bound, bound, generator=generator)

    return fill


def xavier_normal(gain: float = 1.0) -> Initializer:
    """Normal with variance gain**2 * 2 / (fan_in + fan_out) (Glorot and Bengio 2010)."""

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, gain * math.sqrt(2.0 / sum(tensor.shape)), generator=generator)

    return fill


def canonical_name(name: str) -> str:
    """A parameter's name without what recomputation and compilation wrappers add to it."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def find_initializers(model: nn.Module) -> dict[str, Initializer]:
    """Initializer of each parameter by canonical name; an inner module overrules an outer one."""
    found: dict[str, Initializer] = {}
    for module_name, module in model.named_modules():
        if isinstance(module, HasInitializers):
            for name, initializer in module.initializers().items():
                full_name = f"{module_name}.{name}" if module_name else name
                found[canonical_name(full_name)] = initializer
    return found


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Draw all parameters of a materialised model and compute its tables.

    Each parameter is drawn whole, in float32, on the CPU, from a generator seeded by
    ``(seed, canonical name)``, and then copied, whole or a rank's part of it, to where and as what
    it is kept. A tied parameter is drawn once, under its first name.

    Raises:
        ValueError: a module says nothing about one of its parameters or tables.
    """
    initializers = find_initializers(model)
    for name, parameter in model.named_parameters():
        name = canonical_name(name)
        if name not in initializers:
            raise ValueError(
                f"parameter {name} has no initializer; return one for it from initializers() of "
                "its module"
            )
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        full = torch.empty(parameter.shape, dtype=torch.float32)
        initializers[name](full, generator)
        fill(parameter, full)
    for name, module in model.named_modules():
        if isinstance(module, HasBuffers):
            module.reset_buffers()
        elif any(True for _ in module.buffers(recurse=False)):
            raise ValueError(f"module {name} has buffers but no reset_buffers() that fills them")
