"""Commands that generate with a model too big for one device: several ranks share its products."""

from __future__ import annotations

from dataclasses import dataclass

from scalerun.cli.inference_config import InferenceConfig
from scalerun.cli.launch import Work, on_every_rank
from scalerun.dataclass.configs import DistributedConfig
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.ranges import at_least
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.distributed.rendezvous import find_rendezvous

IDLE_SECONDS = 7 * 24 * 3600
"""How long ranks wait for rank 0, which may wait for a prompt."""


@dataclass
class SharedInferenceConfig(InferenceConfig):
    """Which checkpoint to load, what to compute with, and on how many ranks."""

    model_parallel_size: int = option(
        1,
        "ranks that share each matrix product, so that each holds a part of the weights; the "
        "command starts them unless a launcher did",
        aliases=("--tensor-parallel-size",),
    )

    def validate(self) -> None:
        super().validate()
        at_least("--model-parallel-size", self.model_parallel_size, 1)

    def on_every_rank(self, work: Work) -> int:
        """Do the command's work on all ranks; return the exit code.

        Raises:
            ConfigError: a launcher started another number of processes.
            UserError: what a rank raised.
        """
        size = self.model_parallel_size
        place = find_rendezvous(DistributedConfig())
        if place is not None and place.world_size != size:
            raise ConfigError(
                f"--model-parallel-size is {size}, but the launcher started {place.world_size} "
                "processes; give both the same number"
            )
        distributed = DistributedConfig(
            distributed_world_size=size,
            model_parallel_size=size,
            distributed_timeout_seconds=IDLE_SECONDS,
        )
        return on_every_rank(distributed, work, cpu=self.cpu, settings=self.to_dict())
