"""``validate`` and training agree, and the batch size changes nothing."""

import json
import math

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


PLUGIN = """
from scalerun.models import register_model_architecture
from scalerun.models.transformer_lm import MODEL, lm_tiny

register_model_architecture(MODEL, "my_tiny")(lm_tiny)
"""


def test_a_run_is_understood_from_every_folder(run, corpus, tiny, tmp_path):
    """What the user typed was relative to the folder that the run was started from."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/mine.py").write_text(PLUGIN)
    words = ["--user-dir", "plugins", "--arch", "my_tiny", "--max-update", "2"]
    command = run("train", "data", *tiny, *words, "--save-dir", "run")
    assert command.code == 0, command.stderr
    assert "data: data" in (tmp_path / "run/config.yaml").read_text()
    (tmp_path / "elsewhere").mkdir()
    score = run("validate", "--path", "../run", "--cpu", cwd=tmp_path / "elsewhere")
    assert score.code == 0, score.stderr
    assert "valid/first" in score.stdout
    corpus.rename(tmp_path / "moved")
    score = run("validate", "--path", "run", "--cpu")
    assert score.code == 1
    assert f"the data folder {tmp_path}/data does not exist" in score.error


def test_one_set_can_be_named(run, trained, tmp_path):
    found, _ = scores(run, tmp_path, "--path", trained, "--valid-subset", "valid/second")
    assert list(found) == ["valid/second"]


@pytest.fixture
def plain(tmp_path, write_jsonl):
    texts = [f"Line {i}: the {'cat dog owl'.split()[i % 3]} sleeps.\n" for i in range(60)]
    write_jsonl(tmp_path / "plain/verse.jsonl", texts)
    return tmp_path / "plain"


def test_a_part_of_a_plain_folder_is_held_out_and_scored(run, plain, tiny, records, tmp_path):
    words = ["--valid-fraction", "0.2", "--max-epoch", "1", "--lr-scheduler", "constant"]
    command = run("train", plain, *tiny, *words, "--save-dir", "run")
    assert command.code == 0, command.stderr
    save_dir = tmp_path / "run"
    reported = records(save_dir, "valid")[-1]
    data = {event["subset"]: event for event in records(save_dir, "event", event="data")}
    assert records(save_dir, "train")[-1]["tokens_seen"] == data["train"]["tokens"]
    assert data["train"]["documents"] == data["valid"]["lines_other_part"]
    found, _ = scores(run, tmp_path, plain, "--path", "run", "--valid-subset", "valid,train")
    assert list(found) == ["valid", "train"]
    assert found["valid"]["loss"] == reported["loss"]
    assert [found[name]["documents"] for name in found] == [
        data["valid"]["documents"], data["train"]["documents"],
    ]  # fmt: skip
    assert found["valid"]["documents"] + found["train"]["documents"] == 60
    refused = run("train", plain, *tiny, "--valid-fraction", "0.3", *words[2:], "--save-dir", "run")
    assert refused.code == 1
    assert "error: --valid-fraction (0.2, now 0.3) changed" in refused.error


def test_the_text_of_a_plain_folder_can_be_scored(run, plain, tiny, tmp_path):
    command = run("train", plain, *tiny, "--max-update", "2", "--save-dir", "run")
    assert command.code == 0, command.stderr
    refused = run("validate", plain, "--path", "run", "--cpu")
    assert refused.code == 1
    assert "--valid-subset train" in refused.error
    found, _ = scores(run, tmp_path, "--path", "run", "--valid-subset", "train")
    assert found["train"]["documents"] == 60


def test_a_checkpoint_validates_where_nothing_can_be_written(run, trained, corpus, tmp_path):
    """It is complete in itself: a copy of its folder is enough."""
    copy = tmp_path / "elsewhere/checkpoint_6"
    copy.parent.mkdir()
    (trained / "checkpoint_6").rename(copy)
    found, _ = scores(run, tmp_path, corpus, "--path", copy)
    assert set(found) == {"valid/first", "valid/second"}


def test_a_file_for_the_numbers_is_checked_before_the_work(run, trained, corpus, tmp_path):
    (corpus / "valid/first/00/verse.jsonl").write_text("bad\n")
    command = run("validate", corpus, "--path", trained, "--json", trained / "config.yaml/x")
    assert command.code == 1
    assert f"--json {trained}/config.yaml/x cannot be written" in command.error


def test_scores_of_words_add_up_to_the_loss(run, trained, corpus, tmp_path):
    plain, table = scores(run, tmp_path, "--path", trained)
    assert "ppl/word" not in table
    words = ["--output-word-probs", "words/probs.jsonl", "--output-word-stats", "stats.jsonl"]
    found, table = scores(run, tmp_path, "--path", trained, *words, "--batch-size", "3")
    assert "ppl/word" in table
    probs, stats = (
        [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]
        for name in ("words/probs.jsonl", "stats.jsonl")
    )
    for subset, numbers in found.items():
        lines = (corpus / subset / "00/verse.jsonl").read_text().splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        mine = [row for row in probs if row["subset"] == subset]
        expected = [w for text in texts for w in [*text.split(), "</s>"]]
        assert [row["word"] for row in mine] == expected
        assert numbers["loss"] == pytest.approx(plain[subset]["loss"], rel=1e-6)
        bits = -sum(row["logprob"] for row in mine) / math.log(2)
        assert bits == pytest.approx(numbers["loss"] * numbers["tokens"])
        assert sum(row["tokens"] for row in mine) == numbers["tokens"]
        assert numbers["words"] == sum(len(text.split()) for text in texts)
        assert numbers["word_ppl"] == pytest.approx(2 ** (bits / numbers["words"]))
        mine = [row for row in stats if row["subset"] == subset]
        assert sum(row["count"] for row in mine) == len(expected)
        nats = sum(row["count"] * row["logprob"] for row in mine)
        assert -nats / math.log(2) == pytest.approx(bits)


def test_a_file_for_words_is_checked_before_the_work(run, trained):
    command = run("validate", "--path", trained, "--cpu", "--output-word-stats", trained)
    assert command.code == 1
    assert f"--output-word-stats {trained} is a folder" in command.error
