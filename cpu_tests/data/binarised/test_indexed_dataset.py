import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerun.data.binarised.indexed_dataset import IndexedFile, IndexedWriter, stored_dtype
from scalerun.data.token_block_dataset import Packing, TokenBlockDataset
from scalerun.dataclass.errors import UserError

ITEMS = [[7, 8, 2], [2], [9, 2]]
CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 8, "u4": 9, "u8": 10}


def flat(items):
    return [token for item in items for token in item]


def mapped_index(items, code=8, width=2, starts=None):
    """The bytes of an index, number by number."""
    places, place = [], 0
    for item in items:
        places.append(place)
        place += len(item) * width
    content = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, code, len(items))
    content += b"" if starts is None else struct.pack("<Q", len(starts))
    content += b"".join(struct.pack("<i", len(item)) for item in items)
    content += b"".join(struct.pack("<q", place) for place in places)
    return content + b"".join(struct.pack("<q", start) for start in starts or [])


def old_index(items, code=4, width=4):
    places = [0]
    for item in items:
        places.append(places[-1] + len(item))
    content = b"TNTIDX\x00\x00" + struct.pack("<QQQQQ", 1, code, width, len(items), len(items))
    longs = [*range(len(items) + 1), *places, *(len(item) for item in items)]
    return content + b"".join(struct.pack("<q", number) for number in longs)


@pytest.fixture
def files(tmp_path):
    """Writes a pair of files and gives their common name."""

    def write(index, tokens, dtype="u2"):
        (tmp_path / "train.idx").write_bytes(index)
        (tmp_path / "train.bin").write_bytes(np.array(tokens, dtype=f"<{dtype}").tobytes())
        return tmp_path / "train"

    return write


def items_of(file):
    return [file.tokens[a:b].tolist() for a, b in zip(file.ends, file.ends[1:], strict=False)]


@pytest.mark.parametrize("dtype", CODES)
def test_every_type_of_tokens_is_read(files, dtype):
    index = mapped_index(ITEMS, CODES[dtype], np.dtype(dtype).itemsize)
    file = IndexedFile.open(files(index, flat(ITEMS), dtype), num_symbols=10)
    assert items_of(file) == ITEMS
    assert (file.num_documents, file.num_tokens) == (3, 6)
    assert file.document_starts is None


def test_where_documents_begin_is_read_where_the_index_says_so(files):
    file = IndexedFile.open(
        files(mapped_index(ITEMS, starts=[0, 2, 3]), flat(ITEMS)), num_symbols=10
    )
    assert items_of(file) == ITEMS
    assert file.document_starts.tolist() == [0, 2]


def test_the_ids_of_the_older_format_are_one_too_high(files):
    prefix = files(old_index(ITEMS), [token + 1 for token in flat(ITEMS)], "i4")
    file = IndexedFile.open(prefix, num_symbols=10)
    assert items_of(file) == ITEMS
    with pytest.raises(UserError, match="has the token 9, but"):
        items_of(IndexedFile.open(prefix, num_symbols=9))


@given(st.lists(st.lists(st.integers(0, 59_999), max_size=5), max_size=8), st.integers(1, 4))
@settings(max_examples=50)
def test_what_is_written_is_read_and_has_the_bytes_of_the_format(tmp_path_factory, items, parts):
    prefix = tmp_path_factory.mktemp("written") / "train"
    with IndexedWriter(prefix, stored_dtype(60_000)) as writer:
        for i in range(parts):
            mine = items[len(items) * i // parts : len(items) * (i + 1) // parts]
            sizes = np.array([len(item) for item in mine], dtype=np.int64)
            writer.add(np.array(flat(mine), dtype=np.int64), sizes)
        writer.commit()
    assert prefix.with_suffix(".idx").read_bytes() == mapped_index(items)
    assert items_of(IndexedFile.open(prefix, num_symbols=60_000)) == items
    assert len(list(prefix.parent.iterdir())) == 2


def test_large_vocabularies_are_stored_in_32_bits():
    assert [stored_dtype(n).str for n in (8, 65499, 65500)] == ["<u2", "<u2", "<i4"]


def test_an_unfinished_file_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), IndexedWriter(tmp_path / "train", stored_dtype(8)) as w:
        w.add(np.array([4, 2]), np.array([2]))
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_files_of_several_types_form_one_row(tmp_path):
    row = []
    for name, dtype, items in (("a", "<u2", [[7, 2]]), ("b", "<i4", [[70_000, 2], [8, 2]])):
        with IndexedWriter(tmp_path / name, np.dtype(dtype)) as writer:
            writer.add(np.array(flat(items)), np.array([len(item) for item in items]))
            writer.commit()
        row.append(IndexedFile.open(tmp_path / name, num_symbols=80_000))
    blocks = TokenBlockDataset(row, np.arange(3), Packing("none", 9, split_long=False), end_id=2)
    assert blocks[0].tokens.tolist() == [2, 7, 2, 70_000, 2, 8, 2]


GOOD = mapped_index(ITEMS)


@pytest.mark.parametrize(
    ("index", "tokens", "message"),
    [
        (b"", flat(ITEMS), r"train\.idx is not an index of binarised text \(it begins with b''"),
        (b"HUFFIDX" + GOOD, flat(ITEMS), "is not an index"),
        (GOOD[:20], flat(ITEMS), "is not an index"),
        (GOOD[:-1], flat(ITEMS), r"train\.idx is damaged: 61 bytes do not hold 3 items"),
        (GOOD + b"\0" * 9, flat(ITEMS), "damaged: 71 bytes"),
        (GOOD.replace(b"\1", b"\2", 1), flat(ITEMS), "has version 2 of the format; 1 can be read"),
        (mapped_index(ITEMS, code=6, width=8), flat(ITEMS), "floating-point numbers, not tokens"),
        (mapped_index(ITEMS, code=99), flat(ITEMS), "no type of tokens with the code 99"),
        (GOOD, flat(ITEMS)[:-1], r"train\.bin has 10 bytes, but train\.idx names 12; copy both"),
        (GOOD, [*flat(ITEMS), 5], "has 14 bytes"),
        (GOOD[:-8] + b"\xff" * 8, flat(ITEMS), "places do not follow from its sizes"),
        (mapped_index(ITEMS, starts=[0, 2, 9]), flat(ITEMS), "beginnings of its documents"),
        (mapped_index(ITEMS).replace(b"\3\0\0\0\1", b"\3\0\0\xff\1"), flat(ITEMS), "negative size"),
        (old_index(ITEMS)[:-8], flat(ITEMS), "do not hold 3 rows of tokens"),
        (old_index(ITEMS)[:-8] + b"\7" + b"\0" * 7, flat(ITEMS), "places do not follow"),
    ],
)
def test_a_damaged_pair_is_refused_in_one_sentence(files, index, tokens, message):
    with pytest.raises(UserError, match=message) as caught:
        IndexedFile.open(files(index, tokens), num_symbols=10)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["train.idx", "train.bin"])
def test_a_missing_half_is_named(files, name):
    prefix = files(GOOD, flat(ITEMS))
    prefix.with_name(name).unlink()
    with pytest.raises(UserError, match=f"{name} is not there, but belongs to train"):
        IndexedFile.open(prefix, num_symbols=10)


def test_ids_beyond_the_dictionary_are_refused_where_they_are_read(files):
    file = IndexedFile.open(files(GOOD, flat(ITEMS)), num_symbols=9)
    assert file.tokens[0:4].tolist() == [7, 8, 2, 2]
    with pytest.raises(UserError, match=r"train\.bin has the token 9, but dict.txt has 9 symbols"):
        file.tokens[0:6]
    negative = files(mapped_index(ITEMS, code=3), [7, 8, -1, 2, 9, 2], "i2")
    with pytest.raises(UserError, match="the token -1"):
        IndexedFile.open(negative, num_symbols=10).tokens[0:6]
