from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scalerun.modules.dilated_cache import DilatedCache, NewTokens
from scalerun.modules.dilation import Dilation
from scalerun.modules.megatron.heads import Heads

DILATION = Dilation((4, 8), (1, 4))
HEADS = Heads(2, 0, 2)


def tokens(first: int, count: int) -> Tensor:
    """Keys whose entries are their positions: (1, 2, T, 1)."""
    return torch.arange(first, first + count).float().view(1, 1, -1, 1).expand(1, 2, -1, 1)


def grown(*cuts: int) -> DilatedCache:
    """A cache after pieces of these lengths."""
    cache = DilatedCache(DILATION, HEADS, 100)
    cache.fill(tokens(0, cuts[0]), tokens(0, cuts[0]), None)
    start = cuts[0]
    for count in cuts[1:]:
        cache.append(tokens(start, count), tokens(start, count))
        positions = torch.arange(start, start + count)[None]
        cache.store(NewTokens(positions, torch.tensor([start])))
        start += count
    return cache


@pytest.mark.parametrize(
    "cuts", [(11,), (1,) * 11, (3, 5, 3), (8, 1, 1, 1), (1, 10)], ids=lambda cuts: str(len(cuts))
)
def test_slots_hold_the_current_segment_of_each_branch(cuts: tuple[int, ...]) -> None:
    """After eleven tokens: 8 to 10 of the first branch; of the second what each head keeps."""
    cache = grown(*cuts)
    k, _ = cache.append(tokens(11, 1), tokens(11, 1))
    counts = cache.counts(NewTokens(torch.tensor([[11]]), torch.tensor([11])))[0, :, 0]
    assert [k[0, h, counts[h] > 0, 0].tolist() for h in range(2)] == [[8, 9, 10, 11]] * 2
    cache = grown(*cuts, 1)
    k, _ = cache.append(tokens(12, 1), tokens(12, 1))
    counts = cache.counts(NewTokens(torch.tensor([[12]]), torch.tensor([12])))[0, :, 0]
    assert k[0, 0, counts[0] > 0, 0].tolist() == [8, 12]
    assert counts[0, -1] == 2
    assert k[0, 1, counts[1] > 0, 0].tolist() == [12]


def test_memory_does_not_grow_with_the_sequence() -> None:
    cache = grown(20, *[1] * 30)
    assert cache.keys_BHSK is not None
    assert cache.num_slots == 4 + 8 // 4
    assert cache.keys_BHSK.shape == (1, 2, 6 + 100, 1)
    assert DilatedCache(DILATION, HEADS, 10**6).chunk <= 128


def test_short_sequences_need_no_slots_for_long_segments() -> None:
    cache = DilatedCache(Dilation((4, 4096), (1, 4)), HEADS, 10**6)
    cache.fill(tokens(0, 5), tokens(0, 5), None)
    assert cache.sizes == [4, 3]
    for start in range(5, 14):
        cache.append(tokens(start, 1), tokens(start, 1))
        cache.store(NewTokens(torch.tensor([[start]]), torch.tensor([start])))
    assert cache.sizes == [4, 7]
    assert cache.keys_BHSK is not None
    # Head 1 keeps every fourth token from the second on.
    assert cache.keys_BHSK[0, :, 4:8, 0].tolist() == [[0, 4, 8, 12], [1, 5, 9, 13]]


def test_joined_rows_have_their_slots_and_room_for_the_longest() -> None:
    long = grown(7)
    expected = long.keys_BHSK
    assert expected is not None
    for first, second, row in ((grown(7), grown(1), 0), (grown(1), grown(7), 1)):
        assert first.sizes != second.sizes
        first.join(second)
        assert first.sizes == long.sizes
        assert first.length == 7
        assert first.keys_BHSK is not None
        assert first.keys_BHSK.shape[0] == 2
        assert torch.equal(first.keys_BHSK[row], expected[0])
        assert first.keys_BHSK[1 - row, :, 0, 0].tolist() == [0, 0]


def test_padding_is_neither_stored_nor_seen() -> None:
    cache = DilatedCache(DILATION, HEADS, 100)
    first = tokens(0, 3).expand(2, -1, -1, -1)
    cache.fill(first, first, torch.tensor([3, 1]))
    nine = torch.full((2, 2, 2, 1), 9.0)
    padding = torch.tensor([[True, True], [False, True]])
    new = NewTokens(torch.tensor([[2, 2], [1, 1]]), torch.tensor([3, 1]), padding)
    assert new.lengths_after().tolist() == [3, 2]
    cache.append(nine, nine)
    counts = cache.counts(new)
    assert counts[0, ..., -2:].sum() == 0
    assert counts[1, ..., -1].sum() == 0
    cache.store(new)
    assert cache.keys_BHSK is not None
    assert cache.keys_BHSK[:, 0, :2, 0].tolist() == [[0, 1], [0, 9]]
    assert cache.keys_BHSK[0, 0, 2, 0] == 2


def test_reordered_rows_are_copies() -> None:
    cache = DilatedCache(DILATION, HEADS, 100)
    cache.reorder(torch.tensor([0]))
    keys = torch.randn(3, 2, 5, 1)
    cache.fill(keys, -keys, None)
    before = cache.keys_BHSK
    assert before is not None
    cache.reorder(torch.tensor([2, 0]))
    assert cache.keys_BHSK is not None
    assert cache.values_BHSK is not None
    assert torch.equal(cache.keys_BHSK, before[[2, 0]])
    assert torch.equal(cache.values_BHSK, -before[[2, 0]])
