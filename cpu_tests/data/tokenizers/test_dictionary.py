import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerun.data.tokenizers.dictionary import Dictionary


@given(st.integers(4, 10**6))
def test_the_size_is_the_next_multiple_of_8(n):
    dictionary = Dictionary(n, bos=0, pad=1, eos=2, unk=3, digest="")
    assert len(dictionary) % 8 == 0
    assert 0 <= len(dictionary) - n < 8


def test_fillers_and_roles_without_text_are_dropped():
    dictionary = Dictionary(10, bos=5, pad=9, eos=5, unk=None, digest="")
    assert dictionary.dropped_ids == {5, 9, 10, 11, 12, 13, 14, 15}


@pytest.mark.parametrize(
    ("size", "dtype"), [(65529, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_every_id_fits_the_token_type(size, dtype):
    assert Dictionary(size, bos=0, pad=1, eos=2, unk=3, digest="").token_dtype == dtype


def test_a_role_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="pad id 10"):
        Dictionary(10, bos=0, pad=10, eos=2, unk=None, digest="")


def test_another_number_of_rows_is_another_vocabulary_of_the_same_symbols():
    own = Dictionary(10, bos=0, pad=9, eos=2, unk=None, digest="d")
    assert own.with_rows(16) is own
    more = own.with_rows(21)
    assert (len(more), more.num_real_symbols, more.pad) == (21, 10, 9)
    assert more.dropped_ids == {0, 2, 9, *range(10, 21)}
    assert len({own.digest, more.digest, own.with_rows(22).digest}) == 3
    with pytest.raises(ValueError, match="10 symbols"):
        own.with_rows(9)


def test_padding_that_has_no_row_is_the_end_symbol():
    own = Dictionary(10, bos=2, pad=9, eos=2, unk=None, digest="d", adds_pad=True)
    exact = own.with_rows(9)
    assert (len(exact), exact.num_real_symbols, exact.pad, exact.padding_row) == (9, 9, 2, None)
    assert own.with_rows(10).padding_row == 9
    with pytest.raises(ValueError, match="9 symbols"):
        own.with_rows(8)
