import numpy as np
import torch

from scalerun.data.batch import IGNORE_INDEX
from scalerun.data.masked.masked_batch import MaskedCollater
from scalerun.data.masked.masking import MaskedBlock


def block(tokens, places, targets):
    return MaskedBlock(
        np.array(tokens, dtype=np.uint16),
        np.array(places, dtype=np.int64),
        np.array(targets, dtype=np.uint16),
    )


BLOCKS = [block([0, 9, 9, 2], [1, 2], [5, 6]), block([0, 7, 2], [], []), block([0, 9], [1], [2])]


def test_rows_are_padded_to_the_longest_and_targets_are_where_tokens_were_hidden():
    batch = MaskedCollater(1, None, 6)(BLOCKS, [3, 4, 5])
    assert batch.tokens.tolist() == [[0, 9, 9, 2], [0, 7, 2, 1], [0, 9, 1, 1]]
    assert batch.padding.tolist() == [[False] * 4, [False] * 3 + [True], [False] * 2 + [True] * 2]
    assert batch.selected.tolist() == [1, 2, 9]
    assert batch.targets.flatten()[batch.selected].tolist() == [5, 6, 2]
    assert (batch.targets != IGNORE_INDEX).sum() == batch.num_targets == 3
    assert set(batch.net_input()) == {"tokens_BT", "padding_mask_BT", "selected_N"}


def test_rows_may_all_have_the_greatest_length():
    batch = MaskedCollater(1, 6, 6)(BLOCKS, [0, 1, 2])
    assert batch.tokens.shape == (3, 6)
    assert batch.selected.tolist() == [1, 2, 13]


def test_full_rows_have_no_padding():
    assert MaskedCollater(1, None, 6)(BLOCKS[:1], [0]).padding is None


def test_a_batch_of_nothing_is_padding_without_targets():
    batch = MaskedCollater(1, None, 6)([], [])
    assert batch.tokens.tolist() == [[1] * 6]
    assert batch.padding.all()
    assert batch.num_targets == 0
    assert batch.selected.dtype == torch.int64
