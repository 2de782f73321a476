import gzip
import json
import logging
import os
import time

import pytest
import zstandard

from scalerun.data.mixture_dataset import Mixture
from scalerun.data.streaming_dataset import StreamingTextDataset
from scalerun.dataclass.errors import UserError


def epoch_targets(dataset, epoch):
    return [
        block.tokens[1:].tolist()
        for index in range(dataset.num_shards())
        for block in dataset.shard(epoch, index)
    ]


def flat(blocks):
    return sorted(token for block in blocks for token in block)


def test_an_epoch_holds_every_token_once_in_another_order_each_time(number_corpus, open_dataset):
    plain = epoch_targets(open_dataset(number_corpus, seed=None), 1)
    dataset = open_dataset(number_corpus)
    first, second = epoch_targets(dataset, 1), epoch_targets(dataset, 2)
    assert flat(first) == flat(second) == flat(plain)
    assert first != second
    assert first != plain


def test_validation_keeps_the_order_of_the_files_in_every_epoch(write_corpus, open_dataset):
    data = write_corpus({"valid/a/0/x.jsonl": [[5, 6], [7]], "valid/a/1/x.jsonl": [[8]]})
    dataset = open_dataset(data, "valid/a", seed=None)
    assert epoch_targets(dataset, 1) == epoch_targets(dataset, 2) == [[5, 6, 2, 7, 2], [8, 2]]


def test_the_order_depends_on_seed_and_epoch_alone(number_corpus, open_dataset):
    one = epoch_targets(open_dataset(number_corpus, seed=3), 2)
    assert epoch_targets(open_dataset(number_corpus, seed=3, cache="elsewhere"), 2) == one
    assert epoch_targets(open_dataset(number_corpus, seed=4), 2) != one


def test_sequences_are_permuted_too(write_corpus, open_dataset):
    data = write_corpus({"train/0/a.jsonl": [list(range(4, 90))]})
    blocks = epoch_targets(open_dataset(data), 1)
    assert blocks != sorted(blocks)
    assert flat(blocks) == [2, *range(4, 90)]


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "complete"},
        {"length": 6},
        {"seed": 2},
        {"mixture": Mixture({"web": 1, "books": 2})},
    ],
)
def test_every_setting_that_moves_sequences_changes_the_fingerprint(
    number_corpus, open_dataset, change
):
    first = open_dataset(number_corpus).fingerprint
    second = open_dataset(number_corpus, **change).fingerprint
    assert first.split("-")[0] == second.split("-")[0]
    assert first.split("-")[1] != second.split("-")[1]
    assert open_dataset(number_corpus, document_masking=True).fingerprint == first


def test_the_fingerprint_is_of_content_and_names_below_the_folder(
    number_corpus, open_dataset, tmp_path
):
    before = open_dataset(number_corpus).fingerprint
    moved = number_corpus.rename(tmp_path / "moved")
    for path in moved.rglob("*.jsonl"):
        os.utime(path, (1, 1))
    assert open_dataset(moved).fingerprint == before
    file = moved / "train/1/web.jsonl"
    file.write_text(file.read_text().replace("4", "5"))
    assert open_dataset(moved).fingerprint.split("-")[0] != before.split("-")[0]


def test_totals_grow_with_the_shards_read_and_are_there_at_once_next_time(
    number_corpus, open_dataset, monkeypatch
):
    monkeypatch.setattr("scalerun.data.text.digests.SETTLED_NS", 0)
    dataset = open_dataset(number_corpus)
    assert dataset.counts().documents == 0
    dataset.shard(1, 0)
    assert dataset.counts().documents == 20
    assert dataset.num_samples() is None
    blocks = epoch_targets(dataset, 1)
    counts = dataset.counts()
    assert counts.documents == 60
    assert counts.tokens == sum(map(len, blocks))
    texts = [
        json.loads(line)["text"]
        for path in (number_corpus / "train").rglob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert counts.num_bytes == sum(len(text.encode()) for text in texts)
    assert dataset.num_samples() == len(blocks)
    again = open_dataset(number_corpus)
    assert again.counts() == counts
    assert again.num_samples() == len(blocks)


def test_lines_add_up_to_documents_and_what_was_left_out(tmp_path, open_dataset, caplog):
    for shard, content in enumerate(["4 5\n", "\n\n", "{", '{"text": ""}']):
        folder = tmp_path / "data/train" / str(shard)
        folder.mkdir(parents=True)
        good = '{"text": "4 5"}\n' * 3
        (folder / "a.jsonl").write_text(good + content)
    dataset = open_dataset(tmp_path / "data", skip=True, mode="eos", length=2)
    seen = sum(map(len, epoch_targets(dataset, 1)))
    lines = dataset.lines()
    assert lines.lines == 17
    assert lines.lines == lines.documents + lines.blank + lines.empty + lines.quarantined
    assert (lines.documents, lines.blank, lines.empty, lines.quarantined) == (12, 2, 1, 2)
    assert [report["file"] for report in dataset.reports] == ["train/0/a.jsonl", "train/2/a.jsonl"]
    assert dataset.reports[0]["event"] == "bad_record"
    assert (tmp_path / "quarantine.jsonl").read_text().count("\n") == 2
    dropped = sum(shard.num_dropped for shard in dataset._open_shards.values())
    dropped += 3  # of the shard that is closed again
    assert seen + dropped == dataset.counts().tokens == 36


def test_what_packing_drops_is_logged(write_corpus, open_dataset, caplog):
    data = write_corpus({"train/0/a.jsonl": [list(range(4, 20))]})
    with caplog.at_level(logging.INFO):
        epoch_targets(open_dataset(data, mode="complete", length=10), 1)
    assert "drops 7 of 17 tokens" in caplog.text


def test_shares_are_logged_in_documents_and_tokens(number_corpus, open_dataset, caplog):
    with caplog.at_level(logging.INFO):
        open_dataset(number_corpus, mixture=Mixture({"web": 1, "books": 2})).open_first()
    assert "train, shard 0: web has 20 documents and" in caplog.text


def test_a_mixture_must_name_the_corpora(number_corpus, open_dataset):
    with pytest.raises(UserError, match="its corpora: books, web"):
        open_dataset(number_corpus, mixture=Mixture({"wob": 1}))


def test_weights_change_what_is_read(number_corpus, open_dataset):
    dataset = open_dataset(number_corpus, mixture=Mixture({"web": 1, "books": 0}))
    plain = open_dataset(number_corpus)
    for index in range(2):
        assert flat([b.tokens[1:].tolist() for b in dataset.shard(1, index)]) == flat(
            [b.tokens[1:].tolist() for b in plain.shard(1, index)]
        )
    assert len(dataset.shard(1, 2)) > 0


def test_an_empty_corpus_is_refused_with_what_became_of_its_lines(tmp_path, open_dataset):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text('\n \n{"text": ""}\n')
    with pytest.raises(
        UserError,
        match=r"train \(\S*/data\) has no documents: 3 lines, of which 2 blank, 1 empty and 0 bad",
    ):
        open_dataset(folder).open_first()


def test_text_that_changes_during_a_run_is_noticed_when_it_is_read(number_corpus, open_dataset):
    dataset = open_dataset(number_corpus)
    dataset.shard(1, 0)
    file = number_corpus / "train/1/web.jsonl"
    file.write_text(file.read_text().replace("4", "5"))
    with pytest.raises(UserError, match=r"web\.jsonl changed since this run started"):
        dataset.shard(1, 1)


def test_every_kind_of_file_is_read_and_strays_are_not(tmp_path, open_dataset):
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "10"}\r\n\r\n{"text": "11"}')
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "12 \xe2\x80\xa8 13"}\n'))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(b'{"text": ""}\n{"text": "14"}\n'))
    (folder / "d.txt").write_bytes(b"15\r\n16\n")
    (folder / "README.md").write_text("not text to train on")
    dataset = open_dataset(folder, length=20)
    (block,) = dataset.shard(1, 0)
    found = " ".join(map(str, block.tokens[1:].tolist())).split(" 2")
    assert sorted(part.strip() for part in found) == ["", "10", "11", "12 13", "14", "15 16"]


def test_only_some_shards_are_open_at_a_time(write_corpus, open_dataset):
    data = write_corpus({f"train/{i}/a.jsonl": [[4 + i]] for i in range(9)})
    dataset = open_dataset(data)
    epoch_targets(dataset, 1)
    assert len(dataset._open_files) <= 3
    assert len(dataset._open_shards) <= 3


def test_the_next_shard_is_prepared_in_the_background_and_once(
    number_corpus, open_dataset, monkeypatch
):
    dataset = open_dataset(number_corpus)
    dataset.prefetch(1)
    dataset.prefetch(1)
    deadline = time.monotonic() + 20
    while dataset._background.is_running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.setattr("scalerun.data.text.token_cache.TokenCache._build", lambda *a: 1 / 0)
    assert len(dataset.shard(1, 1)) > 0
    starts = []
    monkeypatch.setattr(dataset._background, "start", lambda files: starts.append(files) or True)
    for index in (0, 1, 2, 2):
        dataset.prefetch(index)
    assert [files[0].name for files in starts] == ["train/0/web.jsonl", "train/2/books.jsonl"]


def test_start_up_reads_no_more_text_when_everything_is_cached(
    number_corpus, open_dataset, monkeypatch
):
    monkeypatch.setattr("scalerun.data.text.digests.SETTLED_NS", 0)
    epoch_targets(open_dataset(number_corpus), 1)
    monkeypatch.setattr("scalerun.data.text.digests.file_digest", lambda *a: 1 / 0)
    monkeypatch.setattr("scalerun.data.text.token_cache.JsonlDataset", None)
    dataset: StreamingTextDataset = open_dataset(number_corpus)
    assert len(dataset.shard(7, 2)) > 0
