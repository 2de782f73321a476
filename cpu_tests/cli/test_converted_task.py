"""Converted encoders and encoder-decoders become runs that are scored, asked and trained."""

import json
import re

import pytest
import torch

from cpu_tests.binarised import ENGLISH, SPANISH, pairs_folder, write_dictionary
from cpu_tests.masked_data import make_masked_data
from scalerun.cli.inference import load_model

DIM, HEADS = 16, 2
SHARED = {
    "activation_fn": "relu",
    "layernorm_eps": 1e-5,
    "no_scale_embedding": True,
    "segment_length": None,
}


def write_weights(home, state, sides):
    torch.save(state, home / "weights.pt")
    fields = SHARED | {f"{side}_attention_heads": HEADS for side in sides}
    (home / "fields.json").write_text(json.dumps(fields))


def convert(run, *words):
    flags = ["weights.pt", "--from", "torchscale", "--torchscale-config", "fields.json"]
    return run("convert", *flags, "--output", "run", *words)


@pytest.fixture
def masked(tmp_path, torchscale_state):
    """A data folder, and weights of a masked language model with as many rows as it needs."""
    data = make_masked_data(tmp_path / "data")
    listed = len((data / "dict.txt").read_text(encoding="utf-8").splitlines())
    num_rows = -(-(4 + listed + 101) // 8) * 8
    head = {"dense.weight": (DIM, DIM), "dense.bias": (DIM,), "bias": (num_rows,)}
    head |= {"layer_norm.weight": (DIM,), "layer_norm.bias": (DIM,)}
    state = torchscale_state("encoder.", vocab=num_rows, output=False)
    state |= {f"encoder.output_projection.{key}": torch.ones(shape) for key, shape in head.items()}
    write_weights(tmp_path, state, ["encoder"])
    return data


VOCABULARY = ["--tokenizer", "data/sentencepiece.bpe.model", "--dict", "data/dict.txt"]


@pytest.mark.long
def test_a_masked_language_model_is_scored_and_trained(run, masked, records, tmp_path):
    done = convert(run, *VOCABULARY)
    assert done.code == 0, done.stderr
    (masked / "dict.txt").rename(tmp_path / "dict.txt")  # the checkpoint has the vocabulary
    score = run("validate", masked, "--path", "run", "--cpu", "--json", "v.json")
    assert score.code == 0, score.stderr
    loss = json.loads((tmp_path / "v.json").read_text())["valid"]["loss"]
    train = run(
        "train", masked, "--config", "run/config.yaml", "--finetune-from-model", "run",
        "--dict-file", "dict.txt", "--spm-model", "data/sentencepiece.bpe.model",
        "--max-update", "2", "--batch-size", "4", "--log-interval", "1", "--lr", "1e-9",
        "--save-dir", "tuned", "--cpu",
    )  # fmt: skip
    assert train.code == 0, train.stderr
    tuned = records(tmp_path / "tuned", "valid")[-1]["loss"]
    assert tuned == pytest.approx(loss, rel=0.02)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (VOCABULARY[:2], "--tokenizer of a masked language model is not enough: dict.txt has the"),
        (["--vocabulary", "data"], "--vocabulary is for an encoder-decoder; a masked language"),
        ([*VOCABULARY[:3], "few.txt"], r"embedding has \d+ rows, but --dict few.txt has \d+ symb"),
        (["-s", "en", "-t", "es"], "--source-lang and --target-lang belong to --vocabulary"),
    ],
)
def test_a_vocabulary_that_does_not_fit_a_masked_language_model(run, masked, tmp_path, words, says):
    lines = (masked / "dict.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "few.txt").write_text("".join(lines[:20]), encoding="utf-8")
    failed = convert(run, *words)
    assert failed.code in (1, 2)
    assert re.search(says, failed.error), failed.stderr
    assert not (tmp_path / "run").exists()


@pytest.fixture
def pairs(tmp_path, torchscale_state):
    """Binarised pairs, and weights of a translator whose vocabularies have unequal sizes."""
    folder = pairs_folder(tmp_path / "pairs")
    write_dictionary(folder, [*ENGLISH, *"a1 a2 a3 a4 a5 a6 a7 a8 a9 a10 a11 a12".split()])
    (folder / "dict.txt").rename(folder / "dict.en.txt")
    state = torchscale_state("encoder.", vocab=24, output=False)
    state |= torchscale_state("decoder.", vocab=16, cross=True)
    write_weights(tmp_path, state, ["encoder", "decoder"])
    return folder


@pytest.mark.long
def test_an_encoder_decoder_is_scored_translates_and_is_trained(run, pairs, records, tmp_path):
    done = convert(run, "--vocabulary", "pairs")
    assert done.code == 0, done.stderr
    model = load_model(tmp_path / "run")
    assert len(model.encoder.embedding.tokens.weight) == 24
    score = run("validate", "--path", "run", "--cpu", "--json", "v.json", "--batch-size", "4")
    assert score.code == 0, score.stderr
    loss = json.loads((tmp_path / "v.json").read_text())["valid"]["loss"]
    done = run("generate", "--path", "run", "--cpu", "--output", "out.txt", "--max-len-b", "5")
    assert done.code == 0, done.stderr
    lines = (tmp_path / "out.txt").read_text().splitlines()
    assert len(lines) == 12
    assert {word for line in lines for word in line.split()} <= {*SPANISH, "<unk>", "<s>"}
    train = run(
        "train", "pairs", "--config", "run/config.yaml", "--finetune-from-model", "run",
        "--max-update", "2", "--batch-size", "4", "--log-interval", "1", "--lr", "1e-9",
        "--save-dir", "tuned", "--cpu",
    )  # fmt: skip
    assert train.code == 0, train.stderr
    assert records(tmp_path / "tuned", "valid")[-1]["loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tokenizer", "bytes"], "--tokenizer does not tell the rows of an encoder-decoder"),
        (["--vocabulary", "pairs", "-s", "es", "-t", "en"], "the encoder's embedding has 24 rows"),
        (["--vocabulary", "pairs", "-s", "es"], "--source-lang and --target-lang are given tog"),
        (["--vocabulary", "nowhere"], "--vocabulary nowhere is no folder"),
    ],
)
def test_a_vocabulary_that_does_not_fit_an_encoder_decoder(run, pairs, tmp_path, words, says):
    failed = convert(run, *words)
    assert failed.code in (1, 2)
    assert says in failed.error, failed.stderr
    assert not (tmp_path / "run").exists()


def test_without_a_vocabulary_both_kinds_are_for_python(run, pairs, tmp_path):
    done = convert(run)
    assert done.code == 0, done.stderr
    assert len(load_model(tmp_path / "run").encoder.embedding.tokens.weight) == 24
