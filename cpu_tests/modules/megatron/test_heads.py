from types import SimpleNamespace

import pytest
import torch

from scalerun.modules.megatron.heads import Heads, own_heads


def axis(ranks, rank):
    return SimpleNamespace(size=lambda: ranks, get_local_rank=lambda: rank)


def test_the_ranks_heads_are_all_heads_in_their_order():
    numbers = torch.arange(6)
    parts = [numbers[own_heads(6, axis(3, rank)).own] for rank in range(3)]
    assert torch.equal(torch.cat(parts), numbers)
    assert own_heads(6, axis(3, 1)) == Heads(total=6, first=2, count=2)
    assert own_heads(6, None) == Heads(total=6, first=0, count=6)


def test_heads_that_the_ranks_cannot_share_are_refused():
    with pytest.raises(ValueError, match="4 ranks cannot share 6 heads"):
        own_heads(6, axis(4, 0))
