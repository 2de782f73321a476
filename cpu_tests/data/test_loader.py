import itertools
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from scalerun.data.loader import BatchLoader, valid_batches
from scalerun.data.mixture_dataset import Mixture
from scalerun.dataclass.errors import UserError


@pytest.fixture
def load(number_corpus, open_dataset):
    """Make a loader over the three shards of the number corpus."""

    def load(batch_size=3, *, freq=1, workers=0, max_epoch=2, data=None, **options):
        dataset = open_dataset(data or number_corpus, **options)
        return BatchLoader(
            dataset, batch_size=batch_size, update_freq=lambda epoch: freq, num_workers=workers,
            buffer_size=3, max_epoch=max_epoch,
        )  # fmt: skip

    return load


def content(batches):
    return [
        (batch.tokens.tolist(), batch.targets.tolist(), batch.num_targets, batch.sample_ids)
        for batch in batches
    ]


def rows(batches):
    """Each sequence's targets without padding."""
    return [[t for t in row if t >= 0] for batch in batches for row in batch.targets.tolist()]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(load, workers):
    options = {"freq": 2, "document_masking": True, "reset_positions": True}
    alone, helped = load(**options), load(workers=workers, **options)
    count = 0
    for mine, theirs in itertools.zip_longest(alone.updates(), helped.updates()):
        assert content(mine) == content(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one.positions, other.positions)
            assert torch.equal(one.document_ids, other.document_ids)
        assert alone.state_dict() == helped.state_dict()
        assert (alone.epoch, alone.end_of_epoch) == (helped.epoch, helped.end_of_epoch)
        count += 1
    assert count > 40
    assert alone.state_dict()["epoch"] == 3


def test_cutting_into_other_batches_keeps_the_order(load):
    orders = [
        [row for batches in load(size, freq=freq).updates() for row in rows(batches)]
        for size, freq in ((1, 1), (3, 2), (7, 1), (50, 1))
    ]
    assert all(order == orders[0] for order in orders)


def test_every_token_is_a_target_once_an_epoch(load):
    loader = load(4, max_epoch=1)
    targets = [t for batches in loader.updates() for row in rows(batches) for t in row]
    assert len(targets) == loader.dataset.counts().tokens
    assert targets.count(2) == 60


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_going_on_at_any_update_gives_what_a_straight_run_gives(load, workers):
    straight, states = [], [load().state_dict()]
    loader = load(freq=2)
    for batches in loader.updates():
        straight.append(content(batches))
        states.append(json.loads(json.dumps(loader.state_dict())))
    total = len(straight)
    ends = [i for i, state in enumerate(states) if state["samples"] == 0]
    assert ends == [0, total // 2, total]
    stops = range(total) if workers == 0 else [0, 1, ends[1] - 1, ends[1], total - 1]
    for stop in stops:
        resumed = load(freq=2, workers=workers)
        resumed.load_state_dict(states[stop])
        follow = 4 if workers else total
        found = [content(b) for b in itertools.islice(resumed.updates(), follow)]
        assert found == straight[stop : stop + follow]
        assert resumed.state_dict() == states[min(stop + follow, total)]
    resumed = load(freq=2, workers=workers)
    resumed.load_state_dict(states[total])
    assert list(resumed.updates()) == []


def test_the_state_is_the_place_behind_what_was_yielded_not_what_was_made_ahead(load):
    loader = load(workers=2)
    stream = loader.updates()
    for _ in range(3):
        next(stream)
    time.sleep(0.1)
    state = loader.state_dict()
    assert {key: state[key] for key in ("epoch", "shard", "samples_in_shard", "samples")} == {
        "epoch": 1, "shard": 0, "samples_in_shard": 9, "samples": 9,
    }  # fmt: skip
    stream.close()
    assert loader.state_dict() == state


def test_going_on_with_another_batch_size_starts_at_the_next_sequence(load):
    order = [row for batches in load(1).updates() for row in rows(batches)]
    loader = load(4)
    found = [row for batches in itertools.islice(loader.updates(), 5) for row in rows(batches)]
    other = load(7, freq=2)
    other.load_state_dict(loader.state_dict())
    found += [row for batches in other.updates() for row in rows(batches)]
    assert found == order


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_updates_are_as_if_they_had_been_used(load, workers):
    straight = [content(batches) for batches in load().updates()]
    loader = load(workers=workers)
    loader.skip_updates(2)
    stream = loader.updates()
    found = [content(next(stream)) for _ in range(3)]
    loader.skip_updates(4)
    found += [content(batches) for batches in stream]
    assert found == straight[2:5] + straight[9:]


def test_epochs_and_their_ends_are_known(load):
    loader = load(5)
    seen = [(loader.epoch, loader.end_of_epoch) for _ in loader.updates()]
    per_epoch = len(seen) // 2
    assert seen == [(1, False)] * (per_epoch - 1) + [(1, True)] + [(2, False)] * (per_epoch - 1) + [
        (2, True)
    ]
    assert loader.updates_per_epoch() == per_epoch
    endless = load(5, max_epoch=0)
    assert all(itertools.islice(endless.updates(), 3 * per_epoch))
    assert endless.epoch == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"length": 6}, "--tokens-per-sample (5, now 6) changed"),
        ({"seed": 9}, "--seed (1, now 9) changed"),
        (
            {"mode": "complete", "seed": 9},
            "--sample-break-mode (none, now complete) and --seed (1, now 9) changed",
        ),
        (
            {"mixture": Mixture({"web": 1, "books": 0.5})},
            "--corpus-weights (none, now books=0.5,web=1) changed",
        ),
    ],
)
def test_a_place_under_other_settings_is_refused_and_they_alone_are_named(load, change, says):
    with pytest.raises(UserError) as caught:
        load(**change).load_state_dict(load().state_dict())
    assert str(caught.value).startswith(says)
    assert str(caught.value).endswith("--reset-dataloader")


def test_a_place_from_before_settings_were_kept_one_by_one_still_loads(load):
    state = load().state_dict()
    del state["ingredients"]
    load().load_state_dict(state)
    with pytest.raises(UserError, match="^the text, the tokenizer, or a setting .* changed since"):
        load(seed=9).load_state_dict(state)


def test_a_place_in_other_text_is_refused(load, number_corpus):
    state = load().state_dict()
    file = number_corpus / "train/2/web.jsonl"
    file.write_text(file.read_text().replace("10", "11"))
    with pytest.raises(UserError, match=r"^the training text \(digest \w+, now .* changed since"):
        load().load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_update_larger_than_the_data_is_refused_with_the_numbers(load, write_corpus, workers):
    data = write_corpus({"train/0/a.jsonl": [[5] * 20], "train/1/a.jsonl": [[5] * 8]}, "small")
    loader = load(64, data=data, workers=workers)
    with pytest.raises(
        UserError, match=r"--batch-size 64 x --update-freq 1 = 64 .* epoch of train has 7; lower"
    ):
        next(loader.updates())
    assert len(list(load(7, data=data, max_epoch=1).updates())) == 1  # an exact fit is fine


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_far_into_the_data_comes_behind_what_is_before_it(
    load, write_corpus, tmp_path, workers
):
    data = write_corpus({"train/0/a.jsonl": [[5] * 40], "train/1/a.jsonl": [[5]]}, "bad")
    (data / "train/1/a.jsonl").write_text('{"text": "5"}\n{"text": null}\n')
    loader = load(2, data=data, workers=workers)
    stream = loader.updates()
    for _ in range(4):
        next(stream)
    with pytest.raises(UserError, match=r"train/1/a\.jsonl:2: the value of 'text' is null"):
        next(stream)
    assert loader.state_dict()["samples"] == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_of_the_run_are_left_alone(load, workers):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for _ in itertools.islice(load(workers=workers).updates(), 5):
        pass
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_workers_outlive_a_signal_to_the_group(load, signum):
    expected = [content(batches) for batches in load().updates()]
    loader = load(workers=2)
    found = []
    for batches in loader.updates():
        if not found:
            children = _children()
            assert len(children) >= 2
            subprocess.run(["kill", f"-{int(signum)}", *map(str, children)], check=True)
        found.append(content(batches))
    assert found == expected


@pytest.mark.parametrize("end", ["close", "exhaust", "skip", "error"])
def test_workers_end_with_what_they_were_started_for(load, end, monkeypatch):
    loader = load(workers=2, max_epoch=1)
    stream = loader.updates()
    next(stream)
    workers = _children()
    assert len(workers) >= 2
    start = time.monotonic()
    if end == "close":
        stream.close()
    elif end == "exhaust":
        list(stream)
    elif end == "skip":
        loader.skip_updates(1)
    else:
        with pytest.raises(ZeroDivisionError):
            stream.throw(ZeroDivisionError())
    assert not set(_children()) & set(workers)
    assert time.monotonic() - start < 4


def _children():
    """Workers among the children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in children if "data_worker" in Path(f"/proc/{pid}/comm").read_text()]


def test_validation_scores_every_token_once_whatever_the_batch_size(number_corpus, open_dataset):
    dataset = open_dataset(number_corpus, "valid/one", seed=None)
    orders = []
    for size, workers in ((1, 0), (3, 0), (64, 0), (3, 2)):
        batches = list(valid_batches(dataset, batch_size=size, num_workers=workers))
        assert sum(batch.num_targets for batch in batches) == dataset.counts().tokens
        orders.append(rows(batches))
    assert all(order == orders[0] for order in orders)
    assert len(list(valid_batches(dataset, batch_size=1, max_steps=2))) == 2


def test_an_empty_validation_set_is_refused(write_corpus, open_dataset):
    data = write_corpus({"valid/none/0/a.jsonl": []})
    with pytest.raises(UserError, match=r"valid/none \(\S*/valid/none/0\) has no documents"):
        next(valid_batches(open_dataset(data, "valid/none", seed=None), batch_size=2))
