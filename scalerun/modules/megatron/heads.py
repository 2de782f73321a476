"""Which heads of a layer a rank computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


@dataclass(frozen=True)
class Heads:
    """``count`` neighbouring heads of ``total``, from ``first`` on."""

    total: int
    first: int
    count: int

    @property
    def own(self) -> slice:
        """Their places among all heads."""
        return slice(self.first, self.first + self.count)


def own_heads(num_heads: int, tp_mesh: DeviceMesh | None) -> Heads:
    """This rank's heads: all of them without an axis.

    Raises:
        ValueError: the axis does not divide the heads.
    """
    if tp_mesh is None:
        return Heads(num_heads, 0, num_heads)
    if num_heads % tp_mesh.size():
        raise ValueError(f"{tp_mesh.size()} ranks cannot share {num_heads} heads")
    count = num_heads // tp_mesh.size()
    return Heads(num_heads, tp_mesh.get_local_rank() * count, count)
