import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerun.data.text.token_cache import TokenCache
from scalerun.data.token_block_dataset import Packing, TokenBlockDataset

TABLE = [[10, 11, 12, 13], [20, 21], [30, 31, 32, 33, 34, 35], [40]]
END = 2


class Tokens:
    """A token file in memory."""

    def __init__(self, documents):
        lengths = [len(document) + 1 for document in documents]
        self.tokens = np.array([t for d in documents for t in [*d, END]], dtype=np.uint16)
        self.ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.num_documents = len(documents)
        self.sources = None


def pack(documents, mode, length, *, split_long=False, order=None, files=1, window=0, borders=None):
    parts = [documents[i::files] for i in range(files)]
    order = np.arange(len(documents)) if order is None else np.array(order, dtype=np.int64)
    packing = Packing(mode, length, split_long, window)
    return TokenBlockDataset(
        [Tokens(part) for part in parts], order, packing, end_id=END, borders=borders
    )


def targets(blocks):
    return [block.tokens[1:].tolist() for block in blocks]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("none", [[10, 11, 12, 13, 2], [20, 21, 2, 30, 31], [32, 33, 34, 35, 2], [40, 2]]),
        ("complete", [[10, 11, 12, 13, 2], [20, 21, 2], [30, 31, 32, 33, 34], [40, 2]]),
        ("eos", [[10, 11, 12, 13, 2], [20, 21, 2], [30, 31, 32, 33, 34], [40, 2]]),
        ("eos_pad_8", [[10, 11, 12, 13, 2], [20, 21, 2], [30, 31, 32, 33, 34], [40, 2]]),
    ],
)
def test_the_packing_table(mode, expected):
    assert targets(pack(TABLE, mode, 5)) == expected


def test_complete_joins_documents_that_fit():
    assert targets(pack([[5], [6], [7, 8]], "complete", 5)) == [[5, 2, 6, 2], [7, 8, 2]]


def test_eos_pad_8_pads_to_the_next_multiple_of_8_within_a_block():
    lengths = [block.length for block in pack(TABLE, "eos_pad_8", 20)]
    assert lengths == [8, 8, 8, 8]
    assert [block.length for block in pack(TABLE, "eos_pad_8", 5)] == [5, 5, 5, 5]
    assert [block.length for block in pack(TABLE, "eos", 20)] == [20] * 4


@pytest.mark.parametrize("mode", ["complete", "eos"])
def test_long_documents_are_split_where_every_token_is_scored(mode):
    assert targets(pack(TABLE, mode, 5, split_long=True)) == [
        [10, 11, 12, 13, 2], [20, 21, 2], [30, 31, 32, 33, 34], [35, 2], [40, 2],
    ]  # fmt: skip


def test_the_inputs_are_the_targets_one_later_and_a_document_begins_with_the_end_symbol():
    inputs = [block.tokens[:-1].tolist() for block in pack(TABLE, "none", 5)]
    assert inputs == [[2, 10, 11, 12, 13], [2, 20, 21, 2, 30], [31, 32, 33, 34, 35], [2, 40]]
    inputs = [block.tokens[:-1].tolist() for block in pack(TABLE, "complete", 5)]
    assert inputs == [[2, 10, 11, 12, 13], [2, 20, 21], [2, 30, 31, 32, 33], [2, 40]]
    pieces = pack(TABLE, "eos", 5, split_long=True)
    assert pieces[3].tokens[:-1].tolist() == [34, 35]  # a piece goes on where the last one ended


def test_the_places_where_documents_begin_are_known():
    assert [block.starts.tolist() for block in pack(TABLE, "none", 5)] == [[0], [0, 3], [], [0]]


documents = st.lists(st.lists(st.integers(4, 60_000), max_size=12), min_size=1, max_size=12)


@given(
    documents, st.sampled_from(["none", "complete", "eos", "eos_pad_8"]), st.integers(1, 15),
    st.integers(1, 3), st.randoms(use_true_random=False),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_every_token_is_a_target_once_in_any_order_over_any_number_of_files(
    documents, mode, length, files, random
):
    order = list(range(len(documents)))
    random.shuffle(order)
    by_number = [d for i in range(files) for d in documents[i::files]]
    stream = [t for i in order for t in [*by_number[i], END]]
    blocks = pack(documents, mode, length, split_long=True, order=order, files=files)
    assert [t for block in targets(blocks) for t in block] == stream
    assert blocks.num_tokens == len(stream)
    assert blocks.num_dropped == 0
    seen = 0
    starts = set(np.cumsum([0] + [len(by_number[i]) + 1 for i in order]).tolist())
    for block in blocks:
        size = len(block.tokens) - 1
        assert 0 < size <= block.length <= length
        assert block.tokens[0] == (stream[seen - 1] if seen else END)
        assert {seen + s for s in block.starts.tolist()} == starts & set(range(seen, seen + size))
        seen += size


@given(documents, st.sampled_from(["complete", "eos"]), st.integers(1, 15))
@settings(max_examples=100, deadline=None)
def test_what_training_drops_is_counted_and_comes_from_long_documents(documents, mode, length):
    blocks = pack(documents, mode, length)
    kept = sum(len(block) for block in targets(blocks))
    assert kept + blocks.num_dropped == sum(len(d) + 1 for d in documents)
    assert blocks.num_dropped == sum(max(len(d) + 1 - length, 0) for d in documents)


def texts_apart(lines, length, borders=()):
    """The targets of ``complete_doc``, line by line, as its rule says it."""
    sequences, current = [], []
    for number, line in enumerate(lines):
        ids = [*line, END]
        if number in borders or not line or len(current) + len(ids) > length:
            sequences.append(current)
            current = []
        current += ids if line else []
    return [sequence[:length] for sequence in [*sequences, current] if sequence]


LINES = [[5], [6, 7], [], [], [8], [9, 10, 11, 12, 13, 14], [15], []]


def test_complete_doc_keeps_texts_apart_and_has_no_empty_lines():
    blocks = pack(LINES, "complete_doc", 6)
    assert targets(blocks) == [[5, 2, 6, 7, 2], [8, 2], [9, 10, 11, 12, 13, 14], [15, 2]]
    assert [block.tokens[0] for block in blocks] == [END] * 4
    assert (blocks.num_separators, blocks.num_dropped) == (3, 1)
    borders = np.array([0, 1])
    assert targets(pack(LINES, "complete_doc", 6, borders=borders))[:2] == [[5, 2], [6, 7, 2]]


lines = st.lists(st.lists(st.integers(4, 99), max_size=6), max_size=25)


@given(lines, st.integers(1, 15), st.sets(st.integers(0, 24)))
@settings(max_examples=300, deadline=None)
def test_complete_doc_follows_its_rule(lines, length, borders):
    borders = {border for border in borders if border < len(lines)}
    given = np.array(sorted(borders), dtype=np.int64)
    blocks = pack(lines, "complete_doc", length, borders=given)
    assert targets(blocks) == texts_apart(lines, length, borders)
    whole = pack(lines, "complete_doc", length, borders=given, split_long=True)
    scored = [t for block in targets(whole) for t in block]
    assert scored == [t for line in lines if line for t in [*line, END]]
    assert len(scored) == whole.num_tokens - whole.num_separators


def test_repeated_documents_and_reordered_sequences():
    blocks = pack(TABLE, "eos", 9, order=[3, 1, 3])
    assert targets(blocks) == [[40, 2], [20, 21, 2], [40, 2]]
    blocks.reorder(np.array([1, 2, 0]))
    assert targets(blocks) == [[20, 21, 2], [40, 2], [40, 2]]
    assert targets(blocks[1:]) == [[40, 2], [40, 2]]
    assert blocks[-1].tokens.tolist() == [2, 40, 2]
    with pytest.raises(IndexError):
        blocks[3]


def test_no_documents_make_no_sequences():
    for mode in ("none", "complete", "eos"):
        assert len(pack([], mode, 5)) == 0


def test_any_sequence_is_found_without_reading_the_others(tmp_path, text_file, numbers):
    line = b'{"text": "' + b" ".join(b"%d" % (4 + i % 90) for i in range(99)) + b'"}\n'
    file = TokenCache(tmp_path / "cache", numbers).load(text_file(line * 500))
    packing = Packing("none", 10, split_long=False)
    blocks = TokenBlockDataset([file], np.arange(500), packing, end_id=END)
    assert len(blocks) == 5000
    assert blocks[4321].tokens[1:].tolist() == file.tokens[43210:43220].tolist()


@given(documents, st.sampled_from(["none", "complete", "eos", "eos_pad_8"]), st.data())
@settings(max_examples=200, deadline=None)
def test_every_target_is_scored_once_behind_a_whole_window(documents, mode, data):
    """The reference: a target that the cut without windows gives less context gets the window."""
    length = data.draw(st.integers(2, 15))
    window = data.draw(st.integers(1, length - 1))
    stream = [t for document in documents for t in [*document, END]]
    blocks = pack(documents, mode, length, split_long=True, window=window)
    if mode == "none":
        borders = {0}
    else:
        plain = pack(documents, mode, 10**6 if mode != "complete" else length, split_long=True)
        sizes = [len(t) for t in targets(plain)]
        ends = np.cumsum([0] + [len(d) + 1 for d in documents]).tolist()
        borders = {0, *np.cumsum(sizes).tolist()} & set(ends)
    scored = 0
    for block in blocks:
        size = len(block.tokens) - 1
        given = np.zeros(size, bool) if block.given is None else block.given
        assert size <= block.length <= length
        assert given.tolist() == sorted(given.tolist(), reverse=True)
        first = scored - int(given.sum())
        assert block.tokens[1:].tolist() == stream[first : first + size]
        assert block.tokens[0] == (stream[first - 1] if first else END)
        assert int(given.sum()) == (0 if scored in borders else window)
        assert [first + s for s in block.starts] == [
            e for e in np.cumsum([0] + [len(d) + 1 for d in documents])[:-1].tolist()
            if first <= e < first + size
        ]  # fmt: skip
        scored += size - int(given.sum())
    assert scored == len(stream)


def test_windows_overlap():
    blocks = pack(TABLE, "eos", 3, split_long=True, window=2)
    assert [b.tokens[1:].tolist() for b in blocks][:3] == [[10, 11, 12], [11, 12, 13], [12, 13, 2]]
    assert blocks[1].given.tolist() == [True, True, False]
