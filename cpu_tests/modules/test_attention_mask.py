from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerun.modules.attention_mask import fold_into_bias, visible_keys

CPU = torch.device("cpu")


@given(
    num_keys=st.integers(1, 6),
    num_queries=st.integers(1, 6),
    documents=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    padding=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_a_key_is_seen_if_earlier_real_and_of_the_same_document(
    num_keys: int, num_queries: int, documents: list[int], padding: list[bool]
) -> None:
    num_queries = min(num_queries, num_keys)
    document_ids = torch.tensor(documents).view(2, 6)[:, :num_keys]
    pad = torch.tensor(padding).view(2, 6)[:, :num_keys]
    seen = visible_keys(
        num_queries, num_keys, padding_BS=pad, document_ids_BS=document_ids, device=CPU
    )
    start = num_keys - num_queries
    for b in range(2):
        for t in range(num_queries):
            for s in range(num_keys):
                same = document_ids[b, start + t] == document_ids[b, s]
                expected = s <= start + t and bool(same) and not pad[b, s]
                assert seen[b, 0, t, s] == expected


def test_hidden_keys_get_minus_infinity_and_empty_rows_are_named() -> None:
    seen = torch.tensor([[True, False], [False, False]])[None, None]
    bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None, None]
    folded, empty = fold_into_bias(seen, bias, dtype=torch.float32)
    assert folded.tolist() == [[[[1.0, float("-inf")], [3.0, 4.0]]]]
    assert empty.tolist() == [[[[False], [True]]]]


def test_the_bias_has_the_dtype_asked_for() -> None:
    seen = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    assert fold_into_bias(seen, None, dtype=torch.bfloat16)[0].dtype == torch.bfloat16
