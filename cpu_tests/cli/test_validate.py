"""``validate`` and training agree, and the batch size changes nothing."""

import json

import pytest


@pytest.fixture
def trained(run, corpus, tiny, tmp_path):
    words = ["--max-update", "6", "--validate-interval-updates", "3", "--save-dir", "run"]
    command = run("train", corpus, *tiny, *words, "--save-interval-updates", "3")
    assert command.code == 0, command.stderr
    return tmp_path / "run"


def scores(run, tmp_path, *words):
    command = run("validate", *words, "--cpu", "--json", "scores.json")
    assert command.code == 0, command.stderr
    return json.loads((tmp_path / "scores.json").read_text()), command.stdout


def test_validate_gives_what_training_reported(run, trained, corpus, records, tmp_path):
    for checkpoint in ("checkpoint_3", "checkpoint_6"):
        found, table = scores(run, tmp_path, corpus, "--path", trained / checkpoint)
        update = int(checkpoint.removeprefix("checkpoint_"))
        reported = records(trained, "valid", num_updates=update)
        assert len(reported) == 2
        for record in reported:
            mine = found[record["subset"]]
            for key in ("loss", "ppl", "bits_per_byte", "tokens"):
                assert mine[key] == record[key]
            assert f"{record['loss']:.4f}" in table
    found_by_run, _ = scores(run, tmp_path, "--path", trained)
    assert found_by_run == found


def test_the_batch_size_changes_nothing(run, trained, tmp_path):
    found = [
        scores(run, tmp_path, "--path", trained, "--batch-size", size)[0]
        for size in ("1", "2", "3", "64")
    ]
    for other in found[1:]:
        for subset, numbers in found[0].items():
            assert other[subset] == pytest.approx(numbers, rel=1e-6)


def test_every_token_of_every_document_counts_once(run, trained, corpus, tmp_path):
    """One token for each byte, and one for the end of each document."""
    found, _ = scores(run, tmp_path, "--path", trained)
    for subset, numbers in found.items():
        lines = (corpus / subset / "00/verse.jsonl").read_text().splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        num_bytes = sum(len(text.encode()) for text in texts)
        assert numbers["documents"] == len(texts)
        assert numbers["tokens"] == num_bytes + len(texts)
        bits = numbers["loss"] * numbers["tokens"]
        assert numbers["bits_per_byte"] == pytest.approx(bits / num_bytes)


def test_one_set_can_be_named(run, trained, tmp_path):
    found, _ = scores(run, tmp_path, "--path", trained, "--valid-subset", "valid/second")
    assert list(found) == ["valid/second"]


def test_a_checkpoint_validates_where_nothing_can_be_written(run, trained, corpus, tmp_path):
    """It is complete in itself: a copy of its folder is enough."""
    copy = tmp_path / "elsewhere/checkpoint_6"
    copy.parent.mkdir()
    (trained / "checkpoint_6").rename(copy)
    found, _ = scores(run, tmp_path, corpus, "--path", copy)
    assert set(found) == {"valid/first", "valid/second"}
