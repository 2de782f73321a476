"""Metrics: averages between two training records, kept on the device until someone reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError

Number: TypeAlias = Tensor | float
"""A Python number, or a tensor of one element on any device."""

MetricsState: TypeAlias = dict[str, dict[str, list[float]]]


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

    def flush(self, num_updates: int) -> dict[str, float]:
        """Return ``num_updates``, the means and the last values, and start again from nothing.

        A mean over no weight is NaN. Waits for the device once.
        """
        host = self._sums_on_host()
        record: dict[str, float] = {"num_updates": num_updates}
        for i, name in enumerate(self._means):
            total, weight = host[2 * i], host[2 * i + 1]
            record[name] = total / weight if weight else math.nan
        record.update(zip(self._last, _on_host(list(self._last.values())), strict=True))
        self._means.clear()
        self._last.clear()
        return record

    def state_dict(self) -> MetricsState:
        """What was added since the last flush on this rank, as JSON values; exact."""
        flat = _on_host([number for pair in self._means.values() for number in pair])
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
            self._means = {name: (pair[0], pair[1]) for name, pair in state["means"].items()}
            self._last = {name: value[0] for name, value in state["last"].items()}
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            raise UserError(
                "the checkpoint's statistics cannot be read; start a new run from it: "
                "--save-dir NEW --restore-file OLD --reset-meters"
            ) from error

    def _grow(self, name: str, total: Number, weight: Number) -> None:
        total, weight = _exact(total), _exact(weight)
        if name in self._means:
            old_total, old_weight = self._means[name]
            total, weight = old_total + total, old_weight + weight
        self._means[name] = (total, weight)

    def _sums_on_host(self) -> list[float]:
        numbers = [number for pair in self._means.values() for number in pair]
        if self._reduce is None or not numbers:
            return _on_host(numbers)
        device = next((n.device for n in numbers if isinstance(n, Tensor)), torch.device("cpu"))
        vector = torch.stack(
            [torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers]
        )
        return self._reduce(vector).tolist()


def _exact(number: Number) -> Number:
    """A float64 copy that no later in-place operation of the caller can change."""
    if isinstance(number, Tensor):
        return number.detach().reshape(()).to(torch.float64, copy=True)
    return float(number)


def _on_host(numbers: Sequence[Number]) -> list[float]:
    """All numbers as Python floats, with one transfer for each device involved."""
    result = [0.0 if isinstance(number, Tensor) else float(number) for number in numbers]
    by_device: dict[torch.device, list[int]] = {}
    for i, number in enumerate(numbers):
        if isinstance(number, Tensor):
            by_device.setdefault(number.device, []).append(i)
    for indices in by_device.values():
        stacked = torch.stack([torch.as_tensor(numbers[i]) for i in indices])
        for i, value in zip(indices, stacked.tolist(), strict=True):
            result[i] = value
    return result
