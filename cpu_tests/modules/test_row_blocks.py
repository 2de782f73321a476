import pytest
import torch

from scalerun.modules import row_blocks as module
from scalerun.modules.row_blocks import row_blocks


@pytest.mark.parametrize("elements", [1, 11, 40, 10**6])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 30])
def test_every_row_is_in_one_block_and_a_block_has_few_elements(monkeypatch, elements, num_rows):
    monkeypatch.setitem(module.BLOCK_ELEMENTS, "cpu", elements)
    logits = torch.empty(num_rows, 11)
    blocks = row_blocks(logits)
    rows = torch.arange(num_rows)
    assert torch.equal(torch.cat([rows[:0], *(rows[block] for block in blocks)]), rows)
    assert all(logits[block].numel() <= max(elements, 11) for block in blocks)
