import json

import numpy as np
import pytest

from scalerun.data.batch import IGNORE_INDEX
from scalerun.data.length_batches import BatchLimits
from scalerun.data.loader import BatchLoader, valid_batches
from scalerun.data.parallel.parallel_dataset import ParallelDataset, ParallelRecipe
from scalerun.data.parallel.side import Longest, text_side
from scalerun.data.text.quarantine import QuarantineFile
from scalerun.data.text.segment_dataset import SEGMENTS, SegmentFile
from scalerun.data.text.token_cache import TokenCache
from scalerun.dataclass.errors import UserError

PAD, EOS = 1, 2


@pytest.fixture
def open_pairs(tmp_path, numbers):
    """A dataset of lines of numbers, which are their tokens."""

    def make(sources, targets, *, limits=None, seed=1, skip=False, longest=(None, None)):
        sides = []
        for name, lines, positions in zip(
            ("source", "target"), (sources, targets), longest, strict=True
        ):
            file = SegmentFile(tmp_path / f"train.{name}", f"train.{name}")
            text = "".join(f"{line}\n" for line in lines)
            file.path.write_bytes(text.encode(errors="surrogateescape"))
            cache = TokenCache(tmp_path / "cache", numbers, skip_bad_records=skip, kind=SEGMENTS)
            longest = Longest(positions, f"--max-{name}-positions")
            sides.append(text_side(file, cache, longest))
        recipe = ParallelRecipe(limits or BatchLimits(max_sentences=2), seed, skip)
        quarantine = QuarantineFile(tmp_path / "quarantine.jsonl")
        return ParallelDataset("train", *sides, recipe=recipe, quarantine=quarantine)

    return make


def lines_of_many_lengths(size):
    draw = np.random.default_rng(0)
    return [" ".join(map(str, draw.integers(4, 99, draw.integers(1, 12)))) for _ in range(size)]


def rows(tensor):
    return tensor.tolist()


def test_a_batch_is_what_encoder_and_decoder_read(open_pairs):
    dataset = open_pairs(["5 6 7", "8"], ["9", "10 11"], seed=None)
    batch = dataset.collate([dataset.shard(1, 0)[0]], [0])
    assert rows(batch.source) == [[5, 6, 7, EOS], [8, EOS, PAD, PAD]]
    assert rows(batch.tokens) == [[EOS, 9, PAD], [EOS, 10, 11]]
    assert rows(batch.targets) == [[9, EOS, IGNORE_INDEX], [10, 11, EOS]]
    assert batch.num_targets == 5
    assert batch.sample_ids == [0, 1]
    assert batch.net_input() == {"source_BM": batch.source, "tokens_BT": batch.tokens}


def test_a_batch_of_nothing_is_a_row_of_padding_without_targets(open_pairs):
    batch = open_pairs(["5"], ["6"]).collate([], [])
    assert rows(batch.source) == rows(batch.tokens) == [[PAD]]
    assert rows(batch.targets) == [[IGNORE_INDEX]]
    assert (batch.num_targets, batch.sample_ids) == (0, [])


def test_any_ranks_read_the_same_batches_in_an_update(open_pairs):
    lines = lines_of_many_lengths(45)
    dataset = open_pairs(lines, lines[::-1], limits=BatchLimits(max_tokens=40))

    def read(size, freq):
        loaders = [
            BatchLoader(
                dataset, batch_size=7, update_freq=lambda epoch: freq, num_workers=0,
                buffer_size=1, data_rank=rank, data_size=size, max_epoch=2,
            ).updates()
            for rank in range(size)
        ]  # fmt: skip
        return [
            sorted(rows(b.source) for rank in ranks for b in rank if b.num_targets)
            for ranks in zip(*loaders, strict=True)
        ]

    alone = read(1, 4)
    assert alone == read(2, 2) == read(4, 1)
    half = len(alone) // 2
    first, second = (
        [b for update in part for b in update] for part in (alone[:half], alone[half:])
    )
    assert sorted(first) != sorted(second), "epochs differ"
    assert sum(map(len, first)) == sum(map(len, second)) == 45


def test_a_pass_goes_on_where_it_stopped(open_pairs):
    lines = lines_of_many_lengths(30)
    dataset = open_pairs(lines, lines, limits=BatchLimits(max_tokens=30))

    def loader():
        return BatchLoader(
            dataset, batch_size=1, update_freq=lambda epoch: 2, num_workers=0, buffer_size=1,
            max_epoch=3,
        )  # fmt: skip

    whole = [[b.sample_ids for b in update] for update in loader().updates()]
    first, second = loader(), loader()
    updates = first.updates()
    begun = [[b.sample_ids for b in next(updates)] for _ in range(len(whole) // 2)]
    second.load_state_dict(first.state_dict())
    assert begun + [[b.sample_ids for b in update] for update in second.updates()] == whole


def test_a_changed_setting_of_the_batches_is_named(open_pairs):
    place = BatchLoader(
        open_pairs(["5"], ["6"]), batch_size=1, update_freq=lambda epoch: 1, num_workers=0,
        buffer_size=1,
    ).state_dict()  # fmt: skip
    other = BatchLoader(
        open_pairs(["5"], ["6"], limits=BatchLimits(max_tokens=9)), batch_size=1,
        update_freq=lambda epoch: 1, num_workers=0, buffer_size=1,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"--max-tokens \(none, now 9\) changed since"):
        other.load_state_dict(place)


def test_an_epoch_that_does_not_fill_an_update_is_refused(open_pairs):
    loader = BatchLoader(
        open_pairs(["5"] * 4, ["6"] * 4), batch_size=1, update_freq=lambda epoch: 3,
        num_workers=0, buffer_size=1,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"--update-freq 3 = 3 batches .* train has 2; lower it"):
        next(loader.updates())


def test_validation_scores_every_pair_once(open_pairs):
    lines = lines_of_many_lengths(20)
    dataset = open_pairs(lines, lines, limits=BatchLimits(max_tokens=40), seed=None)
    batches = list(valid_batches(dataset, batch_size=3))
    assert sum(b.num_targets for b in batches) == dataset.counts().tokens
    assert [i for b in batches for i in b.sample_ids] == list(range(20))


def test_pairs_of_blank_lines_are_left_out(open_pairs):
    dataset = open_pairs(["5", "", "7"], ["6", "  ", "8"])
    assert dataset.lines.tolist() == [0, 2]
    assert dataset.describe()["pairs_blank"] == 1
    assert dataset.counts().documents == 2


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        (["5", "6"], ["7"], r"train.source has 2 lines and .*train.target has 1; line n of one"),
        (["5", "6"], ["7", ""], r"train.target:2: the line is empty, and that of train.source is"),
        ([" ", "6"], ["7", "8"], r"train.source:1: the line is empty, and that of train.target is"),
        (["5 6 7"], ["8"], r"train.source:1: 4 tokens are above --max-source-positions 3; repair"),
        (["5"], ["8 9 9 9"], r"train.target:1: 5 tokens are above --max-target-positions 4; rep"),
        (["", ""], ["", ""], "have no pair of lines"),
        ([], [], "have no pair of lines; each side needs a sentence where the other has one"),
    ],
)
def test_pairs_that_cannot_be_used_are_named(open_pairs, sources, targets, message):
    with pytest.raises(UserError, match=message):
        open_pairs(sources, targets, longest=(3, 4))


def test_a_pair_above_the_tokens_of_a_batch_is_named(open_pairs):
    with pytest.raises(UserError, match=r"train.target:2: 4 tokens are above --max-tokens 3;"):
        open_pairs(["5", "5"], ["6", "7 7 7"], limits=BatchLimits(max_tokens=3))


def test_bad_pairs_can_be_skipped_and_are_listed_once(open_pairs, tmp_path):
    for _ in range(2):
        dataset = open_pairs(["5", "", "6 6 6"], ["7", "8", "9"], skip=True, longest=(3, 3))
    assert dataset.lines.tolist() == [0]
    assert dataset.describe()["pairs_bad"] == 2
    listed = (tmp_path / "quarantine.jsonl").read_text().splitlines()
    found = [(r["file"], r["line"], r["record"]) for r in map(json.loads, listed)]
    assert found == [("train.source", 2, " ||| 8"), ("train.source", 3, "6 6 6 ||| 9")]


def test_bytes_that_are_not_utf_8_are_a_bad_pair(open_pairs, tmp_path):
    dataset = open_pairs(["5", "6\udcff"], ["7", "8"], skip=True)
    assert dataset.lines.tolist() == [0]
    [record] = map(json.loads, (tmp_path / "quarantine.jsonl").read_text().splitlines())
    assert (record["line"], record["reason"]) == (2, "not UTF-8: byte 0xFF at byte 2")


def test_what_is_left_out_belongs_to_the_fingerprint(open_pairs):
    sources, targets = ["5", "6 6", "7"], ["5", "6", "7"]
    every = open_pairs(sources, targets, skip=True)
    some = open_pairs(sources, targets, skip=True, longest=(2, None))
    assert every.fingerprint != some.fingerprint
    assert every.ingredients["what is left out"] != some.ingredients["what is left out"]
