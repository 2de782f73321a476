"""NanDetector: which module first made a number that is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


@dataclass(frozen=True)
class Finding:
    """The first non-finite tensor."""

    module: str
    """Canonical name of the module; empty for the model itself."""
    module_type: str
    what: str
    """``output``, ``gradient of the output`` or ``gradient of the input``."""
    values: str
    """Kinds and range of the tensor's values."""
    inputs: str
    """The same of the module's inputs; empty in the backward pass."""
    parameters: tuple[str, ...]
    """The module's own parameters that hold non-finite values."""

    def __str__(self) -> str:
        name = f"{self.module} ({self.module_type})" if self.module else self.module_type
        text = f"the {self.what} of {name} is the first that is not finite: {self.values}"
        if self.inputs:
            text += f"; its input: {self.inputs}"
        if self.parameters:
            text += f"; not finite among its weights: {', '.join(self.parameters)}"
        return text


class NanDetector:
    """A context that watches every module of a model run forward and backward once.

    Slow (it waits for the device at every module), so it is meant for running a batch again after
    its loss or gradient was not finite. :attr:`finding` then tells the first module, in the order
    of execution, whose output or gradient holds NaN or infinity. Weights and gradients are only
    read.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.finding: Finding | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules():
            name = name.replace(_CHECKPOINT_PREFIX, "")
            self._handles.append(
                module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
            )
            self._handles.append(
                module.register_forward_hook(partial(self._after, name), with_kwargs=True)
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def describe(self) -> str:
        """A sentence about the finding, and the parameters whose gradients are not finite."""
        text = str(self.finding or "no module gave a non-finite output or gradient")
        names = nonfinite_gradients(self.model.named_parameters())
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            text += f"; gradients that are not finite: {shown}"
        return text

    def _before(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def watched(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            # A view of its own for each module: its gradient is what this module alone sends back,
            # not the sum over all users of the tensor.
            view = value.view_as(value)
            self._watch(view, name, module, "gradient of the input")
            return view

        return tuple(map(watched, args)), {key: watched(value) for key, value in kwargs.items()}

    def _after(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        for tensor in _float_tensors(output):
            if self.finding is None and not _is_finite(tensor):
                inputs = ", ".join(describe_values(t) for t in _float_tensors((args, kwargs)))
                self.finding = _find(name, module, "output", tensor, inputs)
            if tensor.requires_grad:
                self._watch(tensor, name, module, "gradient of the output")

    def _watch(self, tensor: Tensor, name: str, module: nn.Module, what: str) -> None:
        def look(gradient: Tensor) -> None:
            if self.finding is None and not _is_finite(gradient):
                self.finding = _find(name, module, what, gradient, "")

        self._handles.append(tensor.register_hook(look))


def nonfinite_gradients(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Canonical names of the parameters whose gradient holds NaN or infinity."""
    return [
        name.replace(_CHECKPOINT_PREFIX, "")
        for name, parameter in named_parameters
        if parameter.grad is not None and not _is_finite(parameter.grad)
    ]


def describe_values(tensor: Tensor) -> str:
    """Shape, kinds of non-finite values with their counts, and the range of the finite ones."""
    values = tensor.detach().float()
    kinds = {
        "NaN": torch.isnan(values),
        "Inf": torch.isposinf(values),
        "-Inf": torch.isneginf(values),
    }
    parts = [f"{int(mask.sum())} {kind}" for kind, mask in kinds.items() if bool(mask.any())]
    finite = values[torch.isfinite(values)]
    if finite.numel():
        parts.append(f"finite values from {finite.min().item():.4g} to {finite.max().item():.4g}")
    return f"{tuple(tensor.shape)} with {', '.join(parts) or 'no values'}"


def _find(name: str, module: nn.Module, what: str, tensor: Tensor, inputs: str) -> Finding:
    own = module.named_parameters(recurse=False)
    bad = tuple(key for key, parameter in own if not _is_finite(parameter))
    return Finding(name, _class_name(module), what, describe_values(tensor), inputs, bad)


def _class_name(module: nn.Module) -> str:
    """Of the class as it was written: sharding puts a class of its own on top."""
    kind = type(module)
    # Told by its name: importing it takes most of a second.
    if kind.__bases__[0].__name__ == "FSDPModule":
        kind = kind.__bases__[1]
    return kind.__name__


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _float_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _float_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _float_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _float_tensors(getattr(value, field.name))
