from __future__ import annotations

import math
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DeviceMesh

from scalerun.modules.dilation import Dilation

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("lengths", "ratios", "words"),
    [
        ((), (), "at least one"),
        ((4, 8), (1,), "one dilation ratio for each"),
        ((6,), (4,), "segment length 6 is no multiple of its ratio 4"),
        ((4,), (0,), "ratio 0"),
        ((-4,), (2,), "segment length -4"),
    ],
)
def test_segments_that_make_no_sense_are_refused(
    lengths: tuple[int, ...], ratios: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Dilation(lengths, ratios)
    with pytest.raises(ValueError, match="give block or mod"):
        Dilation((4,), (2,), head_offset="both")


def test_heads_start_in_blocks_or_in_turn() -> None:
    block, mod = Dilation((4,), (2,)), Dilation((4,), (2,), head_offset="mod")
    assert block.offsets(6, 4, CPU).tolist() == [0, 0, 1, 1, 2, 2]
    assert mod.offsets(6, 4, CPU).tolist() == [0, 1, 2, 3, 0, 1]
    assert block.offsets(5, 2, CPU).tolist() == [0, 0, 0, 1, 1]
    assert block.offsets(2, 8, CPU).tolist() == mod.offsets(2, 8, CPU).tolist() == [0, 1]


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 7, 8, 9, 16, 21])
def test_pieces_are_the_sequence(num_tokens: int) -> None:
    for length, ratio in ((4, 1), (4, 4), (12, 3), (8, 2)):
        pieces = Dilation((length,), (ratio,)).cut(num_tokens, length, ratio)
        assert len(pieces) <= 2
        end = 0
        for start, count, size in pieces:
            assert start == end
            assert start % length == 0
            assert size % ratio == 0
            assert size == length or count == 1
            end = start + count * size
        assert num_tokens <= end < num_tokens + ratio


def test_zero_keys_fill_the_last_segment() -> None:
    dilation = Dilation((8,), (4,), zero_keys=True)
    assert dilation.cut(16, 8, 4) == [(0, 2, 8)]
    assert dilation.cut(17, 8, 4) == [(0, 3, 8)]
    assert dilation.cut(5, 8, 4) == [(0, 1, 8)]
    assert dilation.cut(3, 8, 4) == [(0, 1, 4)]


@pytest.mark.parametrize("head_offset", ["block", "mod"])
@pytest.mark.parametrize("num_tokens", [8, 11])
def test_rows_come_from_and_go_to_their_places(num_tokens: int, head_offset: str) -> None:
    dilation = Dilation((4,), (2,), head_offset=head_offset)
    x = torch.randn(2, num_tokens, 3, 5)
    rebuilt, doubled = torch.zeros_like(x), x.clone()
    for piece in dilation.segments(x, causal=True):
        part = piece.take(x)
        offsets = dilation.offsets(3, 2, CPU).tolist()
        for h, offset in enumerate(offsets):
            first = piece.start + offset
            expected = x[0, first : first + 3 : 2, h]
            torch.testing.assert_close(part[0, h, : len(expected)], expected)
        piece.put(rebuilt, part)
        piece.add(doubled, part)
    kept = rebuilt != 0
    assert kept[..., 0].sum() == 2 * sum(
        len(range(offset, num_tokens, 2)) for offset in dilation.offsets(3, 2, CPU).tolist()
    )
    assert torch.equal(rebuilt[kept], x[kept])
    assert torch.equal(doubled, x + rebuilt)


def test_keys_per_query_count_what_is_kept() -> None:
    dilation = Dilation((4, 16), (1, 4))
    assert dilation.keys_per_query(64) == 4 + 16 / 16
    assert dilation.keys_per_query(8) == 4 + 8 / 16
    assert dilation.keys_per_query(2) == 2 + 2 / 16


def test_only_keys_that_are_not_there_are_hidden() -> None:
    x = torch.zeros(1, 13, 2, 1)
    whole, rest = Dilation((8,), (2,)).segments(x, causal=False)
    assert whole.options(0.0).bias_BHTS is None
    bias = rest.options(0.0).bias_BHTS
    assert bias is not None
    assert bias[0, :, 0].tolist() == [[0, 0, 0], [0, 0, -math.inf]]
    for piece in Dilation((8,), (2,)).segments(x, causal=True):
        assert piece.options(0.0).bias_BHTS is None


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(1, 90),
    st.integers(1, 5),
)
def test_slices_are_the_shortest_that_fit(
    pairs: list[tuple[int, int]], num_tokens: int, num_ranks: int
) -> None:
    dilation = Dilation(tuple(n * r for n, r in pairs), tuple(r for _, r in pairs))
    found = dilation.slice_length(num_tokens, num_ranks)
    candidates = range(-(-num_tokens // num_ranks), found + 1)
    assert [length for length in candidates if dilation.fits(length, num_ranks)] == [found]


def test_slices_that_cut_a_segment_or_a_kept_token_do_not_fit() -> None:
    dilation = Dilation((12,), (2,))
    assert [length for length in range(1, 13) if dilation.fits(length, 4)] == [2, 4, 6, 12]
    assert dilation.fits(8, 1)
    assert not dilation.fits(8, 2)


def test_slices_have_neither_padding_nor_zero_keys() -> None:
    class TwoRanks:
        def size(self) -> int:
            return 2

    x, mesh = torch.zeros(1, 6, 2, 1), cast("DeviceMesh", TwoRanks())
    with pytest.raises(ValueError, match="neither padding nor zero keys"):
        Dilation((4,), (1,), zero_keys=True).segments(x, causal=False, sequence_mesh=mesh)
    with pytest.raises(ValueError, match="neither padding nor zero keys"):
        Dilation((4,), (1,)).segments(
            x, causal=True, lengths_B=torch.tensor([3]), sequence_mesh=mesh
        )
    with pytest.raises(ValueError, match="does not fit slices of 6 tokens"):
        Dilation((4,), (1,)).segments(x, causal=True, sequence_mesh=mesh)
