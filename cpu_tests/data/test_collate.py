import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerun.data.batch import IGNORE_INDEX
from scalerun.data.collate import Collater
from scalerun.data.token_block_dataset import TokenBlock

PAD = 1


def block(tokens, starts, length):
    return TokenBlock(np.array(tokens, dtype=np.uint16), np.array(starts, dtype=np.int64), length)


def test_short_sequences_are_padded_and_padding_is_never_a_target():
    batch = Collater(PAD)([block([2, 10, 2], [0], 4), block([5, 6, 7, 8, 9], [], 4)], [7, 8])
    assert batch.tokens.tolist() == [[2, 10, 1, 1], [5, 6, 7, 8]]
    assert batch.targets.tolist() == [[10, 2, -100, -100], [6, 7, 8, 9]]
    assert batch.num_targets == 6
    assert batch.sample_ids == [7, 8]
    assert batch.positions is None
    assert batch.document_ids is None
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64


def test_positions_and_documents_follow_the_targets():
    collate = Collater(PAD, document_masking=True, reset_positions=True)
    batch = collate([block([31, 32, 2, 40, 2, 50], [2, 4], 7)], [0])
    # inputs    31 32  2 40  2  then padding; the separator belongs to what follows it
    assert batch.positions.tolist() == [[0, 1, 0, 1, 0, 0, 1]]
    assert batch.document_ids.tolist() == [[0, 0, 1, 1, 2, 3, 3]]


def test_a_batch_without_sequences_has_one_row_without_targets():
    batch = Collater(PAD, empty_length=3, document_masking=True)([], [])
    assert batch.tokens.tolist() == [[1, 1, 1]]
    assert batch.num_targets == 0
    assert (batch.targets == IGNORE_INDEX).all()
    assert batch.sample_ids == []


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sets(st.integers(0, 8))).map(
            lambda b: block(range(b[0] + 1), sorted(s for s in b[1] if s < b[0]), 9)
        ),
        min_size=1, max_size=4,
    )
)  # fmt: skip
@settings(deadline=None)
def test_positions_count_within_each_document(blocks):
    batch = Collater(PAD, document_masking=True, reset_positions=True)(blocks, range(len(blocks)))
    for row, positions in zip(batch.document_ids.tolist(), batch.positions.tolist(), strict=True):
        for document in set(row):
            places = [i for i, each in enumerate(row) if each == document]
            assert [positions[i] for i in places] == list(range(len(places)))
            assert places == list(range(places[0], places[-1] + 1))
