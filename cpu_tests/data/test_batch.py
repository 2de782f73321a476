from dataclasses import replace

import pytest
import torch

from scalerun.data.batch import IGNORE_INDEX, Batch

ROWS, TOKENS = 2, 7


@pytest.fixture
def batch():
    tokens = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
    targets = (tokens + 1).masked_fill(tokens % 3 == 0, IGNORE_INDEX)
    return Batch(
        tokens=tokens,
        targets=targets,
        num_targets=int((targets != IGNORE_INDEX).sum()),
        sample_ids=[4, 5],
        positions=tokens % TOKENS,
        document_ids=tokens // 5,
    )


@pytest.mark.parametrize("length", [1, 2, 4, 7, 9])
def test_parts_joined_are_the_batch(batch, length):
    parts = [batch.part(index, length) for index in range(-(-TOKENS // length))]
    for name in ("tokens", "targets", "positions", "document_ids"):
        joined = torch.cat([getattr(part, name) for part in parts], 1)
        assert torch.equal(joined[:, :TOKENS], getattr(batch, name))
    assert sum(part.num_targets for part in parts) == batch.num_targets
    assert all(part.tokens.shape == (ROWS, length) for part in parts)
    assert all(part.sample_ids == batch.sample_ids for part in parts)


def test_a_part_past_the_end_has_no_targets(batch):
    for part in (batch.part(3, 4), batch.part(1, TOKENS)):
        assert part.num_targets == 0
        assert (part.targets == IGNORE_INDEX).all()
        assert part.tokens.shape == part.targets.shape


def test_every_part_has_the_whole_source(batch):
    with_source = replace(batch, source=torch.ones(ROWS, 3, dtype=torch.long))
    assert torch.equal(with_source.part(1, 2).source, with_source.source)
    assert with_source.to(torch.device("meta")).source.device.type == "meta"
    assert set(with_source.net_input()) == {"source_BM", "tokens_BT"}
    assert "source_BM" not in batch.net_input()
