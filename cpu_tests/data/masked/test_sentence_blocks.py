"""Packing of sentences, against one written line by line from its description."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerun.data.masked.sentence_blocks import SentenceBlocks
from scalerun.data.token_block_dataset import Packing
from scalerun.data.tokenizers.dictionary import Dictionary

BOS, EOS = 0, 2
DICTIONARY = Dictionary(100, bos=BOS, pad=1, eos=EOS, unk=3, digest="")


@dataclass
class Tokens:
    """What a token file has."""

    documents: list

    @property
    def tokens(self):
        return np.array([t for d in self.documents for s in d for t in [*s, EOS]], dtype=np.uint16)

    @property
    def ends(self):
        return np.cumsum([0] + [sum(len(s) + 1 for s in d) for d in self.documents])

    @property
    def num_tokens(self):
        return len(self.tokens)


def packed(documents, limit, mode):
    """Slowly, one sentence after the other."""
    sequences, current = [], [BOS]
    for document in documents:
        for sentence in document:
            ids = [*sentence, EOS]
            if len(ids) > limit - 1:
                continue
            if len(current) + len(ids) > limit:
                sequences.append(current)
                current = [BOS]
            current = current + ids
        if mode == "complete_doc" and len(current) > 1:
            sequences.append(current)
            current = [BOS]
    if len(current) > 1:
        sequences.append(current)
    return sequences


def blocks_of(files, order, limit, mode):
    packing = Packing(mode, limit, split_long=False)
    blocks = SentenceBlocks(
        [Tokens(file) for file in files], np.array(order, dtype=np.int64), packing,
        dictionary=DICTIONARY,
    )  # fmt: skip
    return blocks, [blocks.tokens(i).tolist() for i in range(len(blocks))]


sentence = st.lists(st.integers(4, 99), max_size=9)
document = st.lists(sentence, min_size=1, max_size=4)


@given(
    files=st.lists(st.lists(document, max_size=4), min_size=1, max_size=3),
    limit=st.integers(3, 14),
    mode=st.sampled_from(["complete", "complete_doc"]),
    data=st.data(),
)
def test_sentences_fill_sequences_one_after_the_other(files, limit, mode, data):
    documents = [document for file in files for document in file]
    numbers = st.lists(st.integers(0, len(documents) - 1), max_size=8) if documents else st.just([])
    order = data.draw(numbers)
    blocks, found = blocks_of(files, order, limit, mode)
    chosen = [documents[i] for i in order]
    assert found == packed(chosen, limit, mode)
    lengths = [len(s) + 1 for d in chosen for s in d]
    assert blocks.num_tokens == sum(lengths)
    assert blocks.num_dropped == sum(n for n in lengths if n > limit - 1)
    present = [len(s) + 1 for d in documents for s in d]
    assert blocks.long_lengths.tolist() == [n for n in present if n > limit - 1]


@pytest.mark.parametrize("mode", ["complete", "complete_doc"])
def test_a_sentence_may_fill_a_sequence_but_not_overflow_it(mode):
    exact, long = list(range(10, 14)), list(range(10, 15))
    blocks, found = blocks_of([[[exact, long, [7]]]], [0], 6, mode)
    assert found == [[BOS, *exact, EOS], [BOS, 7, EOS]]
    assert (blocks.long_lengths.tolist(), blocks.num_dropped) == ([6], 6)


def test_no_sequence_is_a_beginning_alone():
    _, found = blocks_of([[[list(range(10, 30))], [list(range(40, 60))]]], [0, 1], 8, "complete")
    assert found == []
