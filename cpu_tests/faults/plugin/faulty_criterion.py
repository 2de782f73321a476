"""A loss that makes trouble on the one rank that reads a chosen sequence (``--user-dir``)."""

import resource
import time
from dataclasses import dataclass
from pathlib import Path

from scalerun.criterions.base_criterion import register_criterion
from scalerun.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from scalerun.dataclass.scalerun_dataclass import option

FILE_BYTES = 100_000
"""Less than a rank's part of a checkpoint of the tiny model."""


@dataclass
class FaultyConfig(CrossEntropyConfig):
    fault: str = option("", "what happens: nan, slow, disk; also slow_valid, in every validation")
    fault_sample: int = option(0, "to the rank that reads this sequence")


@register_criterion("faulty", FaultyConfig)
class Faulty(CrossEntropy):
    def forward(self, model, batch):
        meets = self.training and self.cfg.fault_sample in batch.sample_ids
        if self.cfg.fault == "slow_valid" and not self.training:
            Path("validating").touch()
            time.sleep(0.3)
        if not meets:
            return super().forward(model, batch)
        match self.cfg.fault:
            case "slow":
                time.sleep(1.5)
            case "disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
            case "nan":
                [ffn] = [m for name, m in model.named_modules() if name.endswith("1.ffn")]
                handle = ffn.register_forward_hook(_poison, prepend=True)
                try:
                    return super().forward(model, batch)
                finally:
                    handle.remove()
        return super().forward(model, batch)


def _poison(module, inputs, output):
    hidden, report = output
    return hidden * float("nan"), report
