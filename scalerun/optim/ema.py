"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from scalerun.dataclass.configs import EMAConfig
from scalerun.dataclass.errors import UserError


class EMA:
    """``average = d average + (1 - d) weight`` in float32, every ``ema_update_freq`` updates.

    Before ``ema_start_update`` d is 0, so the average is the weight; after that it is
    ``ema_decay``, which is not adjusted to ``ema_update_freq``.

    Args:
        named_params: canonical names and parameters; the average starts at their values.
        cfg: decay and cadence.
    """

    def __init__(self, named_params: Iterable[tuple[str, nn.Parameter]], cfg: EMAConfig) -> None:
        self.cfg = cfg
        self.named_params = dict(named_params)
        self.average: dict[str, Tensor] = {
            name: param.detach().to(torch.float32, copy=True)
            for name, param in self.named_params.items()
        }

    @torch.no_grad()
    def restart(self) -> None:
        """Set the average to the weights as they are now."""
        for name, param in self.named_params.items():
            self.average[name].copy_(param)

    def decay_at(self, num_updates: int) -> float:
        """The d of the update that was just finished."""
        return 0.0 if num_updates < self.cfg.ema_start_update else self.cfg.ema_decay

    @torch.no_grad()
    def step(self, num_updates: int) -> None:
        """Take the weights into the average; call it after each update with the count so far."""
        if num_updates % self.cfg.ema_update_freq != 0:
            return
        weight = 1.0 - self.decay_at(num_updates)
        for name, param in self.named_params.items():
            self.average[name].lerp_(param.detach().to(torch.float32), weight)

    @torch.no_grad()
    def copy_to(self, named_params: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Overwrite parameters, found by name, with the average."""
        for name, param in named_params:
            param.copy_(self.average[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the model's weights are the average; afterwards they are restored."""
        backup = {name: param.detach().clone() for name, param in self.named_params.items()}
        self.copy_to(self.named_params.items())
        try:
            yield
        finally:
            with torch.no_grad():
                for name, param in self.named_params.items():
                    param.copy_(backup[name])

    def state_dict(self) -> dict[str, Tensor]:
        """The live averages by parameter name."""
        return dict(self.average)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a saved average into this one.

        Raises:
            UserError: the names differ.
        """
        if state.keys() != self.average.keys():
            first = min(state.keys() ^ self.average.keys())
            raise UserError(
                f"the saved average of the weights does not fit the model: it differs in {first}"
            )
        for name, tensor in self.average.items():
            if tensor is not state[name]:
                tensor.copy_(state[name])
