"""Number formats: which one a forward pass computes in."""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Precision:
    """The format of matrix products. Weights, gradients and optimizer state stay in float32."""

    dtype: torch.dtype
    device: torch.device

    @property
    def needs_loss_scale(self) -> bool:
        """Small gradients vanish in float16 unless the loss is scaled up."""
        return self.dtype is torch.float16

    def autocast(self) -> AbstractContextManager[object]:
        """Context in which modules compute in this format."""
        if self.dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


def choose_precision(*, fp16: bool, bf16: bool, device: torch.device) -> Precision:
    """Turn ``--fp16`` and ``--bf16`` into a format.

    CPUs have no float16 matrix products worth using, so ``--fp16`` there computes in bfloat16 and
    says so.
    """
    if fp16 and device.type == "cpu":
        logger.info("--fp16 on a CPU computes in bfloat16, without loss scaling")
        return Precision(torch.bfloat16, device)
    if fp16:
        return Precision(torch.float16, device)
    return Precision(torch.bfloat16 if bf16 else torch.float32, device)
