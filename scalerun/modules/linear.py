"""A linear layer that is told how it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from scalerun.modules.init import Initializer, LinearInit

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


class Linear(nn.Linear):
    """``x W^T + b`` with ``W`` of shape (out, in). Weights are unset until they are initialised."""

    tp_mesh: DeviceMesh | None = None
    """Axis that shares its weights."""

    def __init__(
        self, in_features: int, out_features: int, *, init: LinearInit, bias: bool = True
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.init = init

    def reset_parameters(self) -> None:
        """Leave the weights unset: :func:`scalerun.modules.init.initialize` draws them."""

    def initializers(self) -> dict[str, Initializer]:
        found = {"weight": self.init.weight}
        if self.bias is not None:
            found["bias"] = self.init.bias
        return found


def product_dtype(x: Tensor) -> torch.dtype:
    """The type that products of ``x`` are computed in: autocast's, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
