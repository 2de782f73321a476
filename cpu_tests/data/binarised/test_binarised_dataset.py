from itertools import pairwise

import pytest

from cpu_tests.binarised import VERSE, verse_folder, write_set
from scalerun.data.binarised.binarised_dataset import BinarisedDataset
from scalerun.data.binarised.binarised_layout import find_prefixes
from scalerun.data.binarised.indexed_dataset import IndexedFile
from scalerun.data.collate import Collater
from scalerun.data.loader import BatchLoader
from scalerun.data.token_block_dataset import Packing
from scalerun.data.tokenizers.fairseq_tokenizer import load_vocabulary
from scalerun.dataclass.errors import UserError


@pytest.fixture
def open_set(tmp_path):
    verse_folder(tmp_path / "data")

    def make(split="train", *, mode="none", length=7, seed=1):
        dictionary = load_vocabulary(tmp_path / "data").dictionary
        prefixes = find_prefixes(str(tmp_path / "data"), split, whole=seed is not None)
        return BinarisedDataset(
            split,
            [IndexedFile.open(p, num_symbols=dictionary.num_real_symbols) for p in prefixes],
            dictionary,
            packing=Packing(mode, length, split_long=seed is None),
            seed=seed,
            collater=Collater(pad_id=dictionary.pad, empty_length=length),
        )

    return make


def targets(blocks):
    return [block.tokens[1:].tolist() for block in blocks]


def test_an_epoch_has_every_token_once_and_each_epoch_another_order(open_set):
    dataset = open_set()
    epochs = [targets(dataset.shard(epoch, 0)) for epoch in (1, 2, 3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert sum(map(len, epochs[0])) == dataset.counts().tokens
    assert targets(open_set().shard(3, 0)) == epochs[2]
    assert targets(open_set(seed=2).shard(1, 0)) != epochs[0]
    assert dataset.num_samples() == len(epochs[0])


def test_sequences_hold_neighbours_of_the_file_across_the_border_of_two_files(open_set):
    """Lines of a text are not torn apart: only the sequences are shuffled."""
    pairs = {pair for block in open_set().shard(1, 0) for pair in pairwise(block.tokens.tolist())}
    row = [2, *(t for name in ("train", "train1") for b in open_set(name, seed=None).shard(1, 0)
                for t in b.tokens[1:].tolist())]  # fmt: skip
    assert pairs == set(pairwise(row))


def test_validation_sets_keep_the_order_of_the_file(open_set):
    dataset = open_set("valid", seed=None)
    assert targets(dataset.shard(1, 0)) == targets(dataset.shard(2, 0))
    stream = [t for block in targets(dataset.shard(1, 0)) for t in block]
    assert [i for i, t in enumerate(stream) if t == 2][:3] == [6, 13, 20]
    assert dataset.counts().documents == len(VERSE)


def test_texts_that_are_kept_apart_count_without_the_empty_lines(open_set):
    dataset = open_set("valid", mode="complete_doc", length=30, seed=None)
    lengths = [len(block.tokens) - 1 for block in dataset.shard(1, 0)]
    assert lengths == [3 * 7] * 6
    counts = dataset.counts()
    assert (counts.documents, counts.tokens) == (18, 6 * 21)


def test_ranks_share_each_epoch_without_overlap(open_set):
    """Two ranks together see in each update what one sees."""

    def seen(rank, size, batch_size):
        loader = BatchLoader(
            open_set(), batch_size=batch_size, update_freq=lambda epoch: 1, num_workers=0,
            buffer_size=1, data_rank=rank, data_size=size, max_epoch=2,
        )  # fmt: skip
        return [[i for batch in batches for i in batch.sample_ids] for batches in loader.updates()]

    halves = zip(seen(0, 2, 3), seen(1, 2, 3), strict=True)
    assert [a + b for a, b in halves] == seen(0, 1, 6)


def test_the_fingerprint_names_what_changed(open_set, tmp_path):
    first = open_set()
    assert open_set().fingerprint == first.fingerprint
    for changed in (open_set(seed=2), open_set(length=8), open_set(mode="complete")):
        assert changed.fingerprint != first.fingerprint
        assert changed.ingredients["the binarised text"] == first.ingredients["the binarised text"]
        assert sum(first.ingredients[k] != v for k, v in changed.ingredients.items()) == 1
    content = (tmp_path / "data/train1.bin").read_bytes()
    (tmp_path / "data/train1.bin").write_bytes(content[2:] + content[:2])
    assert open_set().ingredients["the binarised text"] != first.ingredients["the binarised text"]


def test_no_tokens_are_no_data(open_set, tmp_path):
    write_set(tmp_path / "data/valid", [])
    with pytest.raises(UserError, match=r"valid has no tokens: .*data/valid\.bin; binarise"):
        open_set("valid", seed=None)
