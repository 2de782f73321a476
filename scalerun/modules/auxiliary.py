"""What a layer reports beside its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Auxiliary:
    """The auxiliary loss of one layer, such as the balance loss of a mixture of experts."""

    loss: Tensor
    """Scalar float32, unweighted."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """What to log, detached: scalars and vectors of float32, by name."""


def total_loss(reports: Sequence[Auxiliary]) -> Tensor | None:
    """The layers' losses added up; None if there are none."""
    return torch.stack([report.loss for report in reports]).sum() if reports else None


def mean_stats(reports: Sequence[Auxiliary]) -> dict[str, Tensor]:
    """Scalars averaged over the layers; vectors stacked, one row for each layer that has one."""
    names = sorted({name for report in reports for name in report.stats})
    found = {}
    for name in names:
        values = torch.stack([report.stats[name] for report in reports if name in report.stats])
        found[name] = values.mean() if values.ndim == 1 else values
    return found
