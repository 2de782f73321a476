"""Order and masks are functions of (seed, epoch, sample): nothing else moves them."""

import itertools

import pytest
import torch

from cpu_tests.masked_data import make_masked_data, sentences, write_index, write_shard
from scalerun.data.batch import IGNORE_INDEX
from scalerun.data.loader import BatchLoader, valid_batches
from scalerun.dataclass.errors import UserError
from scalerun.tasks.base_task import TASK_REGISTRY, setup_task


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_masked_data(tmp_path_factory.mktemp("masked") / "data")


@pytest.fixture
def make_task(tmp_path, data):
    def make(seed=1, **settings):
        settings = {"data": str(data), "tokens_per_sample": 32, **settings}
        cfg = TASK_REGISTRY.config_for("pretraining").replace(**settings)
        cfg.validate()
        folder = tmp_path / "run"
        return setup_task(cfg, seed=seed, cache_dir=folder, quarantine=folder / "bad.jsonl")

    return make


def originals(batch):
    """The rows as they were before tokens were hidden, without padding."""
    whole = torch.where(batch.targets == IGNORE_INDEX, batch.tokens, batch.targets)
    return [row[row != 1].tolist() for row in whole]


def samples(batches):
    """By number in the epoch: what is seen, and what is predicted."""
    return {
        number: (row[row != 1].tolist(), target[row != 1].tolist())
        for batch in batches
        for number, row, target in zip(batch.sample_ids, batch.tokens, batch.targets, strict=False)
    }


def epoch_of(task, number=1, **cut):
    """All samples of an epoch, cut into batches in some way."""
    dataset = task.load_dataset("train")
    found = {}
    ranks = cut.pop("data_size", 1)
    for rank in range(ranks):
        loader = BatchLoader(
            dataset, batch_size=cut.get("batch_size", 3), update_freq=lambda epoch: 1,
            num_workers=cut.get("num_workers", 0), buffer_size=2, data_rank=rank, data_size=ranks,
            max_epoch=number,
        )  # fmt: skip
        for batches in loader.updates():
            if loader.epoch == number:
                found |= samples(batches)
    return found


@pytest.mark.parametrize(
    "cut", [{"batch_size": 7}, {"data_size": 3}, {"num_workers": 2, "batch_size": 2}]
)
def test_cutting_into_batches_changes_neither_order_nor_mask(make_task, cut):
    assert epoch_of(make_task(), **cut) == epoch_of(make_task())


def test_padding_changes_neither_order_nor_mask(make_task):
    assert epoch_of(make_task(pad_to_max_length=True)) == epoch_of(make_task())


def test_each_epoch_and_each_seed_has_masks_of_its_own(make_task):
    first, second, other = epoch_of(make_task()), epoch_of(make_task(), 2), epoch_of(make_task(2))
    assert first != second
    assert first != other
    assert epoch_of(make_task(), 2) == second


def test_a_loader_goes_on_where_it_stopped(make_task):
    def loader():
        return BatchLoader(
            make_task().load_dataset("train"), batch_size=3, update_freq=lambda epoch: 2,
            num_workers=0, buffer_size=2,
        )  # fmt: skip

    whole = [samples(update) for update in itertools.islice(loader().updates(), 12)]
    before = loader()
    stream = before.updates()
    for _ in range(5):
        next(stream)
    after = loader()
    after.load_state_dict(before.state_dict())
    assert [samples(update) for update in itertools.islice(after.updates(), 7)] == whole[5:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_prob": 0.2}, r"--mask-prob \(0.15, now 0.2\)"),
        ({"span_length": 1.0}, r"--span-length \(3.0, now 1.0\)"),
        ({"sample_break_mode": "complete_doc"}, "--sample-break-mode"),
    ],
)
def test_a_place_in_other_masks_is_refused(make_task, settings, message):
    def loader(task):
        return BatchLoader(
            task.load_dataset("train"), batch_size=3, update_freq=lambda epoch: 1,
            num_workers=0, buffer_size=2,
        )  # fmt: skip

    state = loader(make_task()).state_dict()
    with pytest.raises(UserError, match=message):
        loader(make_task(**settings)).load_state_dict(state)


def test_validation_reads_every_sentence_once_with_masks_that_never_change(make_task, data):
    def read(seed, size):
        task = make_task(seed)
        batches = list(valid_batches(task.load_dataset("valid"), batch_size=size))
        return task, batches

    task, batches = read(1, 4)
    text = (data / "shard/valid/00000.txt").read_text().split("\n")
    expected = [i for line in text if line for i in [*task.tokenizer.encode(line), 2]]
    assert [i for b in batches for row in originals(b) for i in row if i != 0] == expected
    assert samples(read(2, 5)[1]) == samples(batches)
    counts = task.load_dataset("valid").counts()
    assert (counts.documents, counts.tokens, counts.bytes_per_token) == (9, len(expected), None)


def test_corpora_have_the_shares_of_their_weights(make_task, tmp_path, data):
    folder = tmp_path / "weighted"
    for name in ("sentencepiece.bpe.model", "dict.txt"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes((data / name).read_bytes())
    entries = []
    for name, weight in (("cat", 3.0), ("owl", 1.0)):
        write_shard(folder / f"{name}.txt", [[name] * 4] * 200)
        entries.append({"source": [f"{name}.txt"], "source_lang": name, "weight": weight})
    write_index(folder, "train", entries)
    task = make_task(data=str(folder))
    names = {tuple(task.tokenizer.encode(name)): name for name in ("cat", "owl")}
    tokens = {"cat": 0, "owl": 0}
    for batches in BatchLoader(
        task.load_dataset("train"), batch_size=8, update_freq=lambda epoch: 1, num_workers=0,
        buffer_size=2, max_epoch=1,
    ).updates():  # fmt: skip
        for row in originals(batches[0]):
            for sentence in " ".join(map(str, row[1:])).split(" 2")[:-1]:
                ids = tuple(map(int, sentence.split()))
                tokens[names[ids]] += len(ids) + 1
    assert tokens["cat"] / sum(tokens.values()) == pytest.approx(0.75, abs=0.02)


def test_long_sentences_are_left_out_and_reported_once(make_task, tmp_path, data, caplog):
    folder = tmp_path / "long"
    folder.mkdir()
    for name in ("sentencepiece.bpe.model", "dict.txt"):
        (folder / name).write_bytes((data / name).read_bytes())
    long = " ".join(sentences(30, seed=3))
    write_shard(folder / "a.txt", [["the cat"], ["a dog"]])
    write_shard(folder / "b.txt", [["the cat", "a fox"], [long, "an owl"]])
    index = [{"source": [f"{name}.txt"], "source_lang": name, "weight": 1} for name in "ab"]
    write_index(folder, "train", index)
    task = make_task(data=str(folder))
    for epoch in (1, 2):
        task.load_dataset("train").shard(epoch, 0)
    events = [event for event in task.data_report() if event["event"] == "long_sentences"]
    assert caplog.text.count("left out; raise it, or break their lines") == 1
    assert f"{folder / 'b.txt'}:4 is the first of 1 sentences" in caplog.text
    [event] = events
    assert (event["sentences"], event["files"]) == (1, ["a.txt", "b.txt"])
    assert event["tokens"] == len(task.tokenizer.encode(long)) + 1
