"""What every command that loads a checkpoint can be told."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scalerun.dataclass.configs import CommonConfig
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.distributed.precision import Precision, choose_precision


@dataclass
class InferenceConfig(ScalerunDataclass):
    """Which checkpoint to load, and what to compute with."""

    path: str | None = option(None, "run folder or checkpoint folder")
    use_ema: bool = option(False, "use the averaged weights of --store-ema")
    cpu: bool = option(False, "use the CPU even where a GPU is present")
    fp16: bool = option(False, "compute in half precision (default: as in training)")
    bf16: bool = option(False, "compute in bfloat16 (default: as in training)")
    fp32: bool = option(False, "compute in float32 (default: as in training)")
    user_dir: str | None = option(None, "folder with plug-in code (default: the one of the run)")

    def validate(self) -> None:
        if self.path is None:
            raise ConfigError("--path is required: a run folder or a checkpoint folder")
        if self.fp16 + self.bf16 + self.fp32 > 1:
            raise ConfigError("--fp16, --bf16 and --fp32 exclude each other; give one of them")

    def precision(self, trained: CommonConfig, device: torch.device) -> Precision:
        """The number format: that of training, unless a flag names one."""
        as_trained = not (self.fp16 or self.bf16 or self.fp32)
        return choose_precision(
            fp16=trained.fp16 if as_trained else self.fp16,
            bf16=trained.bf16 if as_trained else self.bf16,
            device=device,
        )
