"""NVIDIA apex's fused AdamW, for those who have built it."""

from __future__ import annotations

from typing import Any

import torch

from scalerun.dataclass.errors import ConfigError


def build_apex_adamw(
    groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """Build ``apex.optimizers.FusedAdam`` with decoupled weight decay.

    Raises:
        ConfigError: NVIDIA's apex is not installed, or a parameter is not on a CUDA device.
    """
    try:
        from apex.optimizers import FusedAdam
    except ImportError as error:
        raise ConfigError(
            "--adam-implementation apex needs NVIDIA's apex, built from "
            "https://github.com/NVIDIA/apex (the package named apex on PyPI is another product); "
            "or leave the flag out to use torch's fused kernel"
        ) from error
    for group in groups:
        for param in group["params"]:
            if not param.is_cuda:
                raise ConfigError(
                    "--adam-implementation apex runs on CUDA devices only, and the model is on "
                    f"{param.device}; leave the flag out to use torch's fused kernel"
                )
    optimizer: torch.optim.Optimizer = FusedAdam(
        groups, lr=0.0, betas=betas, eps=eps, adam_w_mode=True, bias_correction=True
    )
    return optimizer


def steps_to_state(optimizer: torch.optim.Optimizer) -> None:
    """Write apex's step counts, one per group, into each parameter's ``step`` tensor."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param]["step"].fill_(float(group.get("step", 0)))


def steps_from_state(optimizer: torch.optim.Optimizer) -> None:
    """Set apex's step counts from the parameters' ``step`` tensors."""
    for group in optimizer.param_groups:
        group["step"] = max(int(optimizer.state[param]["step"]) for param in group["params"])
