"""``--finetune-from-model``: a new run from another run's weights."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers


@pytest.fixture
def pretrained(run, corpus, tiny, tmp_path):
    command = run("train", corpus, *tiny, "--max-update", "4", "--save-dir", "old")
    assert command.code == 0, command.stderr
    return tmp_path / "old"


@pytest.fixture
def words(tiny):
    return [*tiny, "--lr-scheduler", "constant", "--save-dir", "new"]


def test_the_first_loss_is_that_of_the_weights_and_all_counters_are_new(
    run, corpus, pretrained, words, records, tmp_path
):
    words += ["--finetune-from-model", "old", "--dropout", "0", "--store-ema"]
    command = run("train", corpus, *words, "--max-update", "3", "--lr", "1e-12")
    assert command.code == 0, command.stderr
    rows = records(tmp_path / "new", "train")
    assert [row["num_updates"] for row in rows] == [1, 2, 3]
    assert rows[0]["tokens_seen"] == rows[0]["wpb"]
    old, new = (records(tmp_path / name, "valid")[-2:] for name in ("old", "new"))
    assert [r["loss"] for r in new] == pytest.approx([r["loss"] for r in old], rel=1e-6)
    # The average begins at the loaded weights too, not at those that were drawn.
    ema = run("validate", "--path", "new", "--use-ema", "--cpu", "--json", "ema.json")
    assert ema.code == 0, ema.stderr
    scores = json.loads((tmp_path / "ema.json").read_text())
    for record in new:
        assert scores[record["subset"]]["loss"] == pytest.approx(record["loss"], rel=1e-6)


def test_a_run_with_checkpoints_of_its_own_resumes_from_them(
    run, corpus, pretrained, words, records, tmp_path
):
    words += ["--finetune-from-model", "old"]
    for save_dir, updates in (("whole", "5"), ("new", "2"), ("new", "5")):
        command = run("train", corpus, *words, "--save-dir", save_dir, "--max-update", updates)
        assert command.code == 0, command.stderr
    assert "--finetune-from-model is not used" in command.stderr
    series = [[r["loss"] for r in records(tmp_path / name, "train")] for name in ("new", "whole")]
    assert series[0] == series[1]
    assert len(series[0]) == 5


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (["--restore-file", "old"], 2, "--restore-file chooses what else to take"),
        (["--reset-optimizer"], 2, "and --reset-optimizer chooses what else"),
        (
            ["--decoder-ffn-embed-dim", "48"],
            1,
            "does not fit the model: model.layers.0.ffn.fc1.weight is",
        ),
        (["--tokenizer", "other.json"], 1, "trained with another vocabulary"),
        (["--finetune-from-model", "nowhere"], 1, "--finetune-from-model nowhere does not exist"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(
    run, corpus, pretrained, words, tmp_path, change, code, message
):
    write_vocabulary(tmp_path / "other.json")
    words += ["--finetune-from-model", "old", *change]
    command = run("train", corpus, *words, "--max-update", "2")
    assert command.code == code, command.stderr
    assert message in command.error
    assert not list((tmp_path / "new").glob("checkpoint*"))


def write_vocabulary(path):
    """A vocabulary of as many symbols as that of bytes."""

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = ["<s>", "<pad>", "</s>", "<unk>", *alphabet]
    model = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path.write_text(model.to_str(), encoding="utf-8")
