import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalerun.checkpoint.state_tree import flatten_tensors, merge_state, split_state, to_json

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
keys = st.text("abc.", min_size=1, max_size=4)
tensor = st.integers(0, 9).map(lambda n: torch.tensor(n))
trees = st.recursive(
    st.dictionaries(keys, plain | tensor, max_size=3),
    lambda inner: st.dictionaries(keys, inner | plain | tensor, max_size=3),
    max_leaves=6,
)


@given(trees)
def test_splitting_and_merging_gives_the_state_back_to_the_bit(tree):
    tensors, values = split_state(tree)
    values = json.loads(to_json(values))
    assert repr(merge_state(tensors, values)) == repr(dict(tree)) or merge_state(
        tensors, values
    ) == dict(tree)


@pytest.mark.parametrize("leaf", [np.float32(1.0), {1, 2}, object(), [torch.ones(1)], b"x"])
def test_a_leaf_that_json_cannot_hold_is_refused_by_name(leaf):
    with pytest.raises(TypeError, match=r"state part\.key"):
        split_state({"part": {"key": leaf}})


@pytest.mark.parametrize("tree", [{"part": {1: 2}}, {"part": {"list": [{1: 2}]}}])
def test_a_key_that_json_would_change_is_refused(tree):
    with pytest.raises(TypeError, match="not a string"):
        split_state(tree)


def test_flat_names_join_keys_with_dots():
    one = torch.ones(())
    assert list(flatten_tensors({"a": {"b.c": one, "d": one}, "e": one})) == ["a.b.c", "a.d", "e"]


def test_two_tensors_of_one_flat_name_are_refused():
    one = torch.ones(())
    with pytest.raises(ValueError, match=r"a\.b\.c"):
        flatten_tensors({"a": {"b": {"c": one}, "b.c": one}})
