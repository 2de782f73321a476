from __future__ import annotations

import pytest
import torch

from scalerun.modules.init import initialize, normal
from scalerun.modules.positions.relative_bias import RelativeBias, bucket_of_distance


def bounds(first: int, starts: list[int], last: int) -> dict[int, int]:
    """Bucket of each distance behind, from the first distance of each bucket."""
    table = {}
    for i, start in enumerate(starts):
        end = starts[i + 1] if i + 1 < len(starts) else last + 1
        table.update(dict.fromkeys(range(start, end), first + i))
    return table


BEHIND_32_128 = bounds(0, [*range(9), 12, 16, 23, 32, 46, 64, 91], 300)
BEHIND_32_256 = bounds(8, [8, 13, 20, 30, 46, 70, 108, 166], 300)
ONE_WAY_32_128 = bounds(16, [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113], 300)


@pytest.mark.parametrize(
    ("max_distance", "bidirectional", "behind"),
    [(128, True, BEHIND_32_128), (256, True, BEHIND_32_256), (128, False, ONE_WAY_32_128)],
    ids=["32/128", "32/256", "32/128 one way"],
)
def test_buckets_are_the_published_ones(
    max_distance: int, bidirectional: bool, behind: dict[int, int]
) -> None:
    distances = torch.tensor([-n for n in behind])
    buckets = bucket_of_distance(
        distances, num_buckets=32, max_distance=max_distance, bidirectional=bidirectional
    )
    # The table of 32/128 repeats 8, where shared buckets begin.
    assert buckets.tolist() == list(behind.values())


def test_keys_ahead_use_the_other_half_of_the_buckets() -> None:
    ahead = bucket_of_distance(torch.arange(1, 300), num_buckets=32, max_distance=128)
    behind = bucket_of_distance(-torch.arange(1, 300), num_buckets=32, max_distance=128)
    assert torch.equal(ahead, behind + 16)


def test_keys_ahead_share_bucket_0_one_way() -> None:
    ahead = bucket_of_distance(
        torch.arange(300), num_buckets=32, max_distance=128, bidirectional=False
    )
    assert ahead.unique().tolist() == [0]


def test_the_bias_is_looked_up_by_distance_and_head() -> None:
    position = RelativeBias(8, 6, num_heads=3, init=normal(1.0))
    initialize(position, 0)
    queries, keys = torch.tensor([[2, 3], [0, 1]]), torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])
    bias = position.bias(queries, keys)
    assert bias.shape == (2, 3, 2, 4)
    for b in range(2):
        for t in range(2):
            for s in range(4):
                distance = keys[b, s] - queries[b, t]
                bucket = bucket_of_distance(distance, num_buckets=8, max_distance=6)
                assert torch.equal(bias[b, :, t, s], position.weight[bucket])
