"""Metrics: averages between two training records, kept on the device until someone reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError

Number: TypeAlias = Tensor | float
"""A Python number, or a tensor on any device: one number, or many that are averaged each."""

Average: TypeAlias = float | list["Average"]
"""What a record has of a tensor: a number, or a list as deep as the tensor has dimensions."""

MetricsState: TypeAlias = dict[str, dict[str, list[Average]]]


def perplexity(loss: float) -> float:
    """2 to the power of a loss in bits per token; infinite where that is too large for a float."""
    try:
        return 2.0**loss
    except OverflowError:
        return math.inf


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in bits per token, spread over the bytes of text that a token stands for."""
    return loss / bytes_per_token


class Metrics:
    """Weighted means of what was added since the last flush.

    Nothing waits for the device before :meth:`flush` or :meth:`state_dict`. Sums are kept in
    float64 and grow in the order of the calls, so a run that is stopped between two flushes and
    goes on from its saved state reports the same bits as one that was not.

    Args:
        reduce: sums a float64 vector over the data-parallel ranks; called once in each flush, on
            every rank, with equal length. None where there is one rank.
    """

    def __init__(self, reduce: Callable[[Tensor], Tensor] | None = None) -> None:
        self._reduce = reduce
        self._means: dict[str, tuple[Number, Number]] = {}
        self._last: dict[str, Number] = {}

    def add(self, values: Mapping[str, Number | tuple[Number, Number]]) -> None:
        """Add to means: ``value`` counts once, ``(value, weight)`` counts ``weight`` times."""
        for name, value in values.items():
            number, weight = value if isinstance(value, tuple) else (value, 1.0)
            self._grow(name, _exact(number) * _exact(weight), weight)

    def add_ratio(self, name: str, total: Number, count: Number) -> None:
        """Add to a mean whose values are already summed: the sum of totals over that of counts."""
        self._grow(name, total, count)

    def set(self, values: Mapping[str, Number]) -> None:
        """Keep only the last value: for settings such as the learning rate."""
        for name, value in values.items():
            self._last[name] = _exact(value)

    def is_empty(self) -> bool:
        """Whether nothing was added to a mean since the last flush."""
        return not self._means

    def flush(self, num_updates: int) -> dict[str, Any]:
        """Return ``num_updates``, the means and the last values, and start again from nothing.

        A mean over no weight is NaN; that of tensors with dimensions is a list. Waits for the
        device once.
        """
        sums = self._sums_on_host()
        record: dict[str, Any] = {"num_updates": num_updates}
        for i, name in enumerate(self._means):
            record[name] = _divide(sums[2 * i], sums[2 * i + 1])
        record.update(zip(self._last, _on_host(list(self._last.values())), strict=True))
        self._means.clear()
        self._last.clear()
        return record

    def state_dict(self) -> MetricsState:
        """What was added since the last flush, as JSON values; exact. Every rank calls it."""
        flat = self._sums_on_host()
        return {
            "means": {name: flat[2 * i : 2 * i + 2] for i, name in enumerate(self._means)},
            "last": {
                name: [value]
                for name, value in zip(self._last, _on_host(list(self._last.values())), strict=True)
            },
        }

    def load_state_dict(self, state: MetricsState) -> None:
        """Continue from a :meth:`state_dict`.

        Raises:
            UserError: the state was written by something else.
        """
        try:
            self._means = {
                name: (_loaded(pair[0]), _loaded(pair[1])) for name, pair in state["means"].items()
            }
            self._last = {name: _loaded(value[0]) for name, value in state["last"].items()}
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            raise UserError(
                "the checkpoint's statistics cannot be read; start a new run from it: "
                "--save-dir NEW --restore-file OLD --reset-meters"
            ) from error

    def forget_sums(self) -> None:
        """Make all sums 0; their names stay."""
        for name, (total, weight) in self._means.items():
            self._means[name] = (_zero(total), _zero(weight))

    def _grow(self, name: str, total: Number, weight: Number) -> None:
        total, weight = _exact(total), _exact(weight)
        if name in self._means:
            old_total, old_weight = self._means[name]
            if isinstance(old_total, Tensor) and isinstance(total, Tensor):
                old_total = old_total.to(total.device)  # a loaded one is on the host
            total, weight = old_total + total, old_weight + weight
        self._means[name] = (total, weight)

    def _sums_on_host(self) -> list[Average]:
        numbers = [number for pair in self._means.values() for number in pair]
        if self._reduce is None or not numbers:
            return _on_host(numbers)
        device = next((n.device for n in numbers if isinstance(n, Tensor)), torch.device("cpu"))
        tensors = [torch.as_tensor(n, dtype=torch.float64, device=device) for n in numbers]
        vector = self._reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        return _split(vector, tensors)


def _exact(number: Number) -> Number:
    """A float64 copy that no later in-place operation of the caller can change."""
    if isinstance(number, Tensor):
        copy = number.detach().to(torch.float64, copy=True)
        return copy.reshape(()) if copy.shape == (1,) else copy
    return float(number)


def _zero(number: Number) -> Number:
    return torch.zeros_like(number) if isinstance(number, Tensor) else 0.0


def _loaded(saved: Average) -> Number:
    if isinstance(saved, list):
        return torch.tensor(saved, dtype=torch.float64)
    return saved


def _divide(total: Average, weight: Average) -> Average:
    if isinstance(total, list):
        return [_divide(each, weight) for each in total]
    assert not isinstance(weight, list)
    return total / weight if weight else math.nan


def _on_host(numbers: Sequence[Number]) -> list[Average]:
    """All numbers as Python floats or lists, with one transfer for each device involved."""
    result: list[Average] = [0.0 if isinstance(n, Tensor) else float(n) for n in numbers]
    by_device: dict[torch.device, list[int]] = {}
    for i, number in enumerate(numbers):
        if isinstance(number, Tensor):
            by_device.setdefault(number.device, []).append(i)
    for indices in by_device.values():
        tensors = [torch.as_tensor(numbers[i]) for i in indices]
        vector = torch.cat([tensor.reshape(-1) for tensor in tensors])
        for i, value in zip(indices, _split(vector, tensors), strict=True):
            result[i] = value
    return result


def _split(vector: Tensor, like: Sequence[Tensor]) -> list[Average]:
    """A vector cut into values of the given shapes, on the host."""
    pieces = vector.cpu().split([tensor.numel() for tensor in like])
    return [piece.view(one.shape).tolist() for piece, one in zip(pieces, like, strict=True)]
