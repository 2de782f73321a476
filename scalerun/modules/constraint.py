"""Rules that parameters have to obey, and that an optimizer step breaks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn


class Constrained(ABC):
    """A module with such a rule, beside being an ``nn.Module``."""

    @abstractmethod
    def constrain(self) -> None:
        """Bring the parameters back to where the rule holds; those that are there keep their bits.

        Parameters may be DTensors that are sharded in any way.
        """


def constrain(model: nn.Module) -> None:
    """Make all parameters obey the rules of their modules.

    To be called before the first forward pass in training, and after every optimizer step. Where
    parameters are sharded all ranks call it. A forward pass cannot do it: what it writes to
    parameters that were gathered for it is lost.
    """
    for module in model.modules():
        if isinstance(module, Constrained):
            module.constrain()
