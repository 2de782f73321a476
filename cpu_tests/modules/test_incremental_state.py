from __future__ import annotations

import pytest
import torch

from scalerun.modules.incremental_state import EncodedSource, IncrementalState, KVCache

CPU = torch.device("cpu")


def test_the_cache_returns_all_keys_so_far_and_grows_to_twice_what_is_needed() -> None:
    cache = KVCache(30)
    keys, values = torch.randn(2, 2, 3, 30, 4)
    room = []
    for t in range(30):
        one = slice(t, t + 1)
        all_keys, all_values = cache.append(keys[:, :, one], values[:, :, one], start=t)
        assert torch.equal(all_keys, keys[:, :, : t + 1])
        assert torch.equal(all_values, values[:, :, : t + 1])
        assert cache.keys_BHSK is not None
        room.append(cache.keys_BHSK.shape[2])
    assert sorted(set(room)) == [2, 6, 14, 30]


def test_a_long_prompt_gets_room_for_all_that_follows_at_once() -> None:
    cache = KVCache(6)
    keys = torch.randn(2, 3, 5, 4)
    cache.append(keys[:, :, :3], keys[:, :, :3], start=0)
    storage = cache.keys_BHSK
    all_keys, _ = cache.append(keys[:, :, 3:], keys[:, :, 3:], start=3)
    assert torch.equal(all_keys, keys)
    assert cache.keys_BHSK is storage
    assert storage is not None
    assert storage.shape == (2, 3, 6, 4)


@pytest.mark.parametrize("order", [[1, 0], [0, 0, 1], [1]])
def test_reordering_moves_every_row(order: list[int]) -> None:
    cache = KVCache(4)
    state = IncrementalState([cache], batch_size=2, max_length=4)
    keys = torch.randn(2, 1, 3, 2)
    padding = torch.tensor([[True, False, False], [False, False, False]])
    state.place(padding, num_tokens=3, device=CPU)
    cache.append(keys, keys, start=0)
    state.advance(3)
    state.reorder(torch.tensor(order))
    one = keys[order][:, :, :1]
    state.check(len(order), 1)
    queries, _, moved_padding = state.place(None, num_tokens=1, device=CPU)
    all_keys, _ = cache.append(one, one, start=3)
    assert torch.equal(all_keys[:, :, :3], keys[order])
    if 0 in order:
        assert moved_padding is not None
        assert torch.equal(moved_padding[:, :3], padding[order])
    else:
        assert moved_padding is None
    assert queries.tolist() == [[2 if row == 0 else 3] for row in order]


def test_what_is_padding_in_all_rows_that_are_left_is_forgotten() -> None:
    cache = KVCache(9)
    state = IncrementalState([cache], batch_size=3, max_length=9)
    keys = torch.randn(3, 1, 4, 2)
    padding = torch.arange(4) < torch.tensor([[0], [3], [1]])
    state.place(padding, num_tokens=4, device=CPU)
    cache.append(keys, keys, start=0)
    state.advance(4)
    state.reorder(torch.tensor([2, 1]))
    assert state.length == cache.length == 3
    queries, _, left = state.place(None, num_tokens=1, device=CPU)
    all_keys, _ = cache.append(keys[:2, :, :1], keys[:2, :, :1], start=3)
    assert torch.equal(all_keys[:, :, :3], keys[[2, 1], :, 1:])
    assert cache.keys_BHSK is not None
    assert cache.keys_BHSK.shape[2] <= 2 * 4
    assert left is not None
    assert left.tolist() == [[False] * 4, [True, True, False, False]]
    assert queries.tolist() == [[3], [1]]


@pytest.mark.parametrize(("first", "second"), [(2, 2), (1, 3), (3, 1)])
def test_joined_rows_end_together_and_keep_their_places(first: int, second: int) -> None:
    keys = torch.randn(2, 1, 4, 2)

    def state_of(row: int, length: int) -> IncrementalState:
        cache = KVCache(9)
        state = IncrementalState([cache], batch_size=1, max_length=9)
        state.place(None, num_tokens=length, device=CPU)
        mine = keys[row : row + 1, :, :length]
        cache.append(mine, mine, start=0)
        state.advance(length)
        return state

    state = state_of(0, first)
    state.join(state_of(1, second))
    longest = max(first, second)
    assert (state.length, state.batch_size) == (longest, 2)
    queries, _, padding = state.place(None, num_tokens=1, device=CPU)
    [cache] = state.layers
    assert isinstance(cache, KVCache)
    assert cache.keys_BHSK is not None
    for row, length in enumerate((first, second)):
        assert queries[min(row, len(queries) - 1)].tolist() == [length]
        mine = cache.keys_BHSK[row, :, :longest]
        assert torch.equal(mine[:, longest - length :], keys[row, :, :length])
        assert not mine[:, : longest - length].any()
        if padding is not None:
            assert padding[row].tolist() == [True] * (longest - length) + [False] * (length + 1)
    assert (padding is None) == (first == second)


def test_states_that_cannot_go_on_together_are_not_joined() -> None:
    def state_of(length: int, max_length: int = 9) -> IncrementalState:
        state = IncrementalState([], batch_size=1, max_length=max_length)
        state.advance(length)
        return state

    with pytest.raises(ValueError, match="max_length 9 is not 8"):
        state_of(1).join(state_of(1, 8))
    with pytest.raises(ValueError, match="has read nothing"):
        state_of(1).join(state_of(0))
    sourced = state_of(1)
    sourced.source = EncodedSource(torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="with and without a source"):
        sourced.join(state_of(1))


def test_joined_sources_are_padded_at_their_ends_and_cut_when_the_longest_leaves() -> None:
    long, short = torch.randn(1, 3, 2), torch.randn(1, 1, 2)
    source = EncodedSource(long).joined(EncodedSource(short, torch.tensor([[False]])))
    assert source.padding_BM is not None
    assert source.padding_BM.tolist() == [[False] * 3, [False, True, True]]
    assert torch.equal(source.features_BMD[0], long[0])
    assert torch.equal(source.features_BMD[1, :1], short[0])
    left = source.reorder(torch.tensor([1])).without_common_padding()
    assert torch.equal(left.features_BMD, short)


def test_without_padding_all_rows_share_their_positions() -> None:
    state = IncrementalState([], batch_size=3, max_length=9)
    state.advance(4)
    queries, keys, padding = state.place(None, num_tokens=2, device=CPU)
    assert queries.tolist() == [[4, 5]]
    assert keys.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert padding is None


def test_padding_does_not_count_wherever_it_stands() -> None:
    state = IncrementalState([], batch_size=2, max_length=9)
    padding = torch.tensor([[True, True, False], [False, False, True]])
    queries, _, _ = state.place(padding, num_tokens=3, device=CPU)
    assert queries.tolist() == [[0, 0, 0], [0, 1, 1]]
    state.advance(3)
    queries, keys, padded = state.place(None, num_tokens=2, device=CPU)
    assert queries.tolist() == [[1, 2], [2, 3]]
    assert keys.tolist() == [[0, 0, 0, 1, 2], [0, 1, 1, 2, 3]]
    assert padded is not None
    assert padded.tolist() == [
        [True, True, False, False, False],
        [False, False, True, False, False],
    ]


def test_padding_may_begin_late() -> None:
    state = IncrementalState([], batch_size=2, max_length=9)
    state.place(None, num_tokens=2, device=CPU)
    state.advance(2)
    queries, keys, _ = state.place(
        torch.tensor([[True, False], [False, False]]), num_tokens=2, device=CPU
    )
    assert queries.tolist() == [[1, 2], [2, 3]]
    assert keys.tolist() == [[0, 1, 1, 2], [0, 1, 2, 3]]


def test_what_does_not_fit_is_refused() -> None:
    state = IncrementalState([], batch_size=2, max_length=4)
    state.advance(3)
    with pytest.raises(ValueError, match="holds 2 sequences, the tokens 3"):
        state.check(3, 1)
    with pytest.raises(ValueError, match="max_length 4"):
        state.check(2, 2)
    state.check(2, 1)
