"""A learned bias for each bucket of distances (Raffel et al. 2020, arXiv:1910.10683).

B batch (or 1), T queries, S keys, H heads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from scalerun.distributed.sharding import empty_parameter, part_of
from scalerun.modules.init import Initializer
from scalerun.modules.positions.base_position import BasePosition

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


def bucket_of_distance(
    distance: Tensor, *, num_buckets: int, max_distance: int, bidirectional: bool = True
) -> Tensor:
    """Bucket of ``key position - query position``; near distances get one each, far ones share.

    The boundaries of the shared buckets depend on float32 rounding in exactly this order.
    """
    behind = -distance
    if bidirectional:
        num_buckets //= 2
        base = torch.where(behind < 0, num_buckets, 0)
        behind = behind.abs()
    else:
        base = torch.zeros_like(behind)
        behind = behind.clamp_min(0)
    exact = num_buckets // 2
    ratio = torch.log(behind.clamp_min(1).float() / exact) / math.log(max_distance / exact)
    shared = exact + (ratio * (num_buckets - exact)).long()
    shared = shared.clamp_max(num_buckets - 1)
    return base + torch.where(behind < exact, behind, shared)


class RelativeBias(BasePosition):
    """One table (buckets, heads) for all layers, looked up by the distance from query to key.

    TorchScale's tables are bidirectional in causal decoders too, where half of the rows are never
    used; ``bidirectional=False`` is the T5 form. With ``tp_mesh`` H is this rank's share of heads.
    """

    def __init__(
        self,
        num_buckets: int,
        max_distance: int,
        *,
        num_heads: int,
        init: Initializer,
        bidirectional: bool = True,
        tp_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.init = init
        self.tp_mesh = tp_mesh
        self.weight = empty_parameter((num_buckets, num_heads), mesh=tp_mesh, dim=1)

    def initializers(self) -> dict[str, Initializer]:
        return {"weight": self.init}

    def bias(self, query_BT: Tensor, key_BS: Tensor) -> Tensor:
        buckets_BTS = bucket_of_distance(
            key_BS[:, None, :] - query_BT[:, :, None],
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        weight = part_of(self.weight, self.tp_mesh)
        return F.embedding(buckets_BTS, weight).permute(0, 3, 1, 2)
