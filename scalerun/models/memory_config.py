"""The settings that trade time for the memory of activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.models.stack import Stack
from scalerun.modules.activation_memory import RECOMPUTE_CHOICES, ActivationMemory

MEMORY_FREE_SETTINGS = frozenset(
    {
        "checkpoint_activations",
        "checkpoint_activations_interval",
        "recompute",
        "offload_activations",
    }
)
"""What may change in mid-run: all of it."""


@dataclass
class MemoryConfig(ScalerunDataclass):
    """What blocks keep for the backward pass, and where. No gradient depends on it."""

    checkpoint_activations: bool = option(
        False, "keep only the input of each block and recompute the rest in the backward pass"
    )
    checkpoint_activations_interval: int = option(
        1, "only every n-th block recomputes; the others keep everything"
    )
    recompute: str = option(
        "all",
        "what --checkpoint-activations recomputes: all of a block, or all but attention and "
        "products with weights, whose results are kept",
        choices=RECOMPUTE_CHOICES,
    )
    offload_activations: bool = option(
        False, "on a GPU: what blocks keep for the backward pass waits in host memory"
    )

    def activation_memory(self) -> ActivationMemory:
        """How these settings run blocks."""
        return ActivationMemory(
            recompute=self.recompute if self.checkpoint_activations else None,
            interval=self.checkpoint_activations_interval,
            offload=self.offload_activations,
        )

    def check_memory(self, stacks: Sequence[Stack]) -> None:
        """Refuse what makes no sense.

        Raises:
            ConfigError: names the flag.
        """
        interval = self.checkpoint_activations_interval
        if interval < 1:
            raise ConfigError(f"--checkpoint-activations-interval is {interval}; give 1 or more")
        for contradicts, message in MEMORY_CONTRADICTIONS:
            if contradicts(self):
                raise ConfigError(message)
        if all(interval > stack.num_layers for stack in stacks):
            layers = " or ".join(f"--{stack.side}-layers {stack.num_layers}" for stack in stacks)
            raise ConfigError(
                f"--checkpoint-activations-interval {interval} recomputes no layer of {layers}; "
                "lower it"
            )

    def check_training(self, *, on_cpu: bool, compiled: bool) -> None:
        """Refuse what a training run cannot do on this device, or with compiled blocks.

        Raises:
            ConfigError: names the flag.
        """
        if self.offload_activations and on_cpu:
            raise ConfigError(
                "--offload-activations has no effect on a CPU, whose memory is the host's; remove "
                "it, or give --checkpoint-activations to save memory"
            )
        if self.recompute == "selective" and compiled:
            raise ConfigError(
                "--recompute selective does not see the products in compiled blocks and would not "
                "keep them; give --recompute all or --no-compile"
            )


MEMORY_CONTRADICTIONS: tuple[tuple[Callable[[MemoryConfig], bool], str], ...] = (
    (
        lambda cfg: not cfg.checkpoint_activations and cfg.checkpoint_activations_interval != 1,
        "--checkpoint-activations-interval has no effect without --checkpoint-activations; add "
        "that or remove this",
    ),
    (
        lambda cfg: not cfg.checkpoint_activations and cfg.recompute != "all",
        "--recompute selective has no effect without --checkpoint-activations; add that or remove "
        "this",
    ),
    (
        lambda cfg: cfg.recompute == "selective" and cfg.offload_activations,
        "--offload-activations does not reach what --recompute selective keeps; give --recompute "
        "all or --no-offload-activations",
    ),
)
"""Combinations of these settings that make no sense, and the sentence that says so."""
