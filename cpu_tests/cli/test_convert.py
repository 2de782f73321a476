"""From TorchScale's weights to a run folder, by the command."""

from __future__ import annotations

import argparse
import functools
import json
import math
from pathlib import Path

import pytest
import sentencepiece
import torch

from scalerun.cli.convert import main
from scalerun.cli.inference import load_model
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models.torchscale.loader import load_decoder

VOCAB, DIM, HEADS, FFN, LAYERS = 264, 16, 2, 32, 1
FIELDS = {
    "decoder_attention_heads": HEADS,
    "activation_fn": "relu",
    "layernorm_eps": 1e-5,
    "no_scale_embedding": True,
    "segment_length": None,
}
RESETS = ["--reset-optimizer", "--reset-lr-scheduler", "--reset-meters", "--reset-dataloader"]


def encoder_fields():
    return {name.replace("decoder", "encoder"): value for name, value in FIELDS.items()}


@pytest.fixture
def stack_state(torchscale_state):
    """A state dict of one stack of these sizes."""
    return functools.partial(torchscale_state, dim=DIM, ffn_dim=FFN, num_layers=LAYERS)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Writes the weights and their configuration -> the first words of the command."""
    monkeypatch.chdir(tmp_path)

    def write(state, fields=FIELDS, name="weights.pt"):
        torch.save(state, name)
        words = [name, "--from", "torchscale", "--output", "run"]
        if fields is not None:
            (tmp_path / "fields.json").write_text(json.dumps(fields))
            words += ["--torchscale-config", "fields.json"]
        return words

    return write


@pytest.fixture
def converted(files, stack_state, run, tmp_path):
    """A run folder of a decoder of bytes."""
    command = run("convert", *files(stack_state()), "--tokenizer", "bytes")
    assert command.code == 0, command.stderr
    assert "its logits are the same" in command.stderr
    return tmp_path / "run"


@torch.no_grad()
def test_the_checkpoint_computes_what_the_weights_say(converted, stack_state):
    fields = {k: v for k, v in FIELDS.items() if v is not None}
    sizes = {"embed_dim": DIM, "ffn_embed_dim": FFN, "layers": LAYERS}
    fields |= {f"decoder_{name}": value for name, value in sizes.items()}
    expected = load_decoder(fields, stack_state(), version="main").eval()
    tokens = torch.tensor([[4, 100, 263]])
    assert torch.equal(load_model(converted)(tokens).logits, expected(tokens).logits)


def test_a_converted_run_answers_and_is_scored(converted, corpus, run):
    answer = run("interactive_cli", "--path", converted, "--cpu", "--json", stdin="the\n")
    assert answer.code == 0, answer.stderr
    assert json.loads(answer.stdout)["tokens"]
    score = run("validate", corpus, "--path", converted, "--cpu")
    assert score.code == 0, score.stderr
    assert "first" in score.stdout
    blind = run("validate", "--path", converted, "--cpu")
    assert blind.error == "error: the data folder is missing: give it as the first argument"


def train_words(corpus, *more):
    words = [corpus, "--config", "run/config.yaml", "--batch-size", "4", "--max-update", "2"]
    words += ["--tokens-per-sample", "32", "--cpu", "--save-dir", "tuned", "--restore-file", "run"]
    return [*words, "--log-format", "simple", "--log-interval", "1", *more]


@pytest.mark.long
def test_training_goes_on_from_a_converted_run(converted, corpus, run, records, tmp_path):
    train = run("train", *train_words(corpus, *RESETS))
    assert train.code == 0, train.stderr
    [resumed] = records(tmp_path / "tuned", "event", event="resumed")
    assert resumed["checkpoint"] == "run/checkpoint_0"
    score = run("validate", corpus, "--path", converted, "--cpu", "--valid-subset", "train")
    assert score.code == 0, score.stderr
    # The first update starts at the converted weights' own loss, far from that of fresh ones.
    loss = float(score.stdout.splitlines()[1].split()[1])
    first = records(tmp_path / "tuned", "train")[0]["loss"]
    assert first == pytest.approx(loss, rel=0.1)
    assert loss > math.log2(VOCAB) * 1.05


def test_what_a_converted_run_lacks_is_named_with_all_flags(converted, corpus, run):
    train = run("train", *train_words(corpus))
    assert train.code == 1
    assert "has no optimizer, lr_scheduler, loader, metrics, throughput" in train.error
    assert all(flag in train.error for flag in RESETS)


def test_where_the_weights_come_from_is_kept(converted):
    source = json.loads((converted / "checkpoint_0/converted_from.json").read_text())
    assert (source["library"], source["file"]) == ("torchscale", "weights.pt")
    assert source["versions"] == ["main", "0.3.0"]
    assert source["fields"]["decoder_layers"] == LAYERS
    assert "scalerun.cli.convert weights.pt" in (converted / "command.txt").read_text()


def test_without_a_tokenizer_the_vocabulary_is_taken_on_trust(files, stack_state, corpus, run):
    assert run("convert", *files(stack_state())).code == 0
    ask = run("interactive_cli", "--path", "run", "--cpu", stdin="the\n")
    assert "was converted without a tokenizer" in ask.error
    task = ["--task", "streaming_language_modeling", "--tokenizer"]
    train = run("train", *train_words(corpus, *RESETS), *task, "bytes")
    assert train.code == 0, train.stderr
    assert "is taken on trust" in train.stderr
    made = run("train_tokenizer", corpus, "--vocab-size", "290", "--output", "t.model")
    assert made.code == 0, made.stderr
    other = run("train", *train_words(corpus, *RESETS, "--save-dir", "other"), *task, "t.model")
    assert other.code == 1
    assert "use the architecture and the tokenizer that it was trained with" in other.error


def test_rows_follow_the_pieces_of_the_tokenizer(files, stack_state, tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "the owl slept"] * 9),
        model_prefix="text",
        vocab_size=20,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file="text.model")
    pieces = [model.id_to_piece(i) for i in range(3, 20)][::-1]
    lines = [*pieces, "madeupword0000", "madeupword0001", "madeupword0002"]
    (tmp_path / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in lines))
    state = stack_state(vocab=24)
    words = files(state)
    with torch.no_grad():
        assert main(words) == 0
        theirs = load_model("run")(torch.tensor([[2, *range(4, 21)]])).logits
        words[words.index("run")] = "ours"
        assert main([*words, "--tokenizer", "text.model", "--dict", "dict.txt"]) == 0
        ids = [model.piece_to_id(piece) for piece in pieces]
        ours = load_model("ours")(torch.tensor([[model.eos_id(), *ids]])).logits
    torch.testing.assert_close(ours[..., ids], theirs[..., 4:21])
    special = [model.bos_id(), 20, model.eos_id(), model.unk_id()]
    torch.testing.assert_close(ours[..., special], theirs[..., :4])


def test_a_checkpoint_of_fairseq_needs_no_configuration(files, stack_state, run, tmp_path):
    state = {key: tensor.half() for key, tensor in stack_state("decoder.").items()}
    record = argparse.Namespace(arch="lm_base", decoder_attention_heads=HEADS, subln=True)
    words = files({"model": state, "args": record}, fields=None)
    refused = run("convert", *words)
    assert "give --allow-namespace" in refused.error
    command = run("convert", *words, "--allow-namespace", "--tokenizer", "bytes")
    assert command.code == 0, command.stderr
    assert "weights in float16 become float32" in command.stderr
    assert command.stderr.count("TorchScale's defaults are taken") == 1
    assert (
        "defaults are taken: activation_fn: gelu, layernorm_eps: 1e-05, no_scale_embedding: true, "
        "segment_length: null\n" in command.stderr
    )
    model = load_model(tmp_path / "run")
    assert torch.equal(
        model.embedding.tokens.weight.detach(), state["decoder.embed_tokens.weight"].float()
    )
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}


def mlm_state(stack_state):
    head = {"dense.weight": (DIM, DIM), "dense.bias": (DIM,), "bias": (VOCAB,)}
    head |= {"layer_norm.weight": (DIM,), "layer_norm.bias": (DIM,)}
    ones = {f"encoder.output_projection.{key}": torch.ones(shape) for key, shape in head.items()}
    return stack_state("encoder.", output=False) | ones


def beit3_state(stack_state):
    state = stack_state("beit3.encoder.", output=False, halves=(".A", ".B"))
    state["beit3.text_embed.weight"] = state.pop("beit3.encoder.embed_tokens.weight")
    shapes = {"cls_token": (1, 1, DIM), "mask_token": (1, 1, DIM), "proj.bias": (DIM,)}
    shapes["proj.weight"] = (DIM, 3, 2, 2)
    state |= {f"beit3.vision_embed.{key}": torch.ones(shape) for key, shape in shapes.items()}
    state |= {f"beit3.encoder.embed_positions.{half}.weight": torch.ones(7, DIM) for half in "AB"}
    return state | {"vision_head.weight": torch.ones(2)}


@pytest.mark.parametrize(
    ("arch", "state", "fields"),
    [
        ("transformer_encoder", lambda stack: stack("encoder."), {}),
        ("transformer_mlm", mlm_state, {}),
        ("beit3", beit3_state, {}),
        (
            "transformer_mt",
            lambda stack: stack("encoder.", output=False) | stack("decoder.", cross=True),
            {"decoder_attention_heads": HEADS},
        ),
    ],
)
def test_other_models_are_for_python(files, stack_state, arch, state, fields, caplog):
    assert main(files(state(stack_state), encoder_fields() | fields)) == 0
    model = load_model("run")
    assert not model.training
    content = json.loads(Path("run/checkpoint_0/config.json").read_text())
    assert content["model"]["_name"] == arch
    assert content["task"] is None
    if arch == "beit3":
        assert "1 tensors around the model are left out: vision_head.weight" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "run", "--from", "torchscale"], "the file to convert is missing"),
        (["weights.pt", "--output", "run"], "--from is required"),
        (["weights.pt", "--from", "torchscale"], "--output is required"),
        (["weights.pt", "--from", "megatron", "--output", "run"], "--from: 'megatron'"),
        (
            ["weights.pt", "--from", "torchscale", "--output", "run", "--dict", "dict.txt"],
            "--dict needs the sentencepiece model",
        ),
    ],
)
def test_a_wrong_command_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        main(words)


def test_an_output_that_holds_something_is_refused(files, stack_state, tmp_path):
    words = files(stack_state())
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="--output run is not empty"):
        main(words)
    words[words.index("run")] = "weights.pt"
    with pytest.raises(UserError, match="--output weights.pt is a file"):
        main(words)
    assert (tmp_path / "run/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(files, stack_state, tmp_path, value):
    state = stack_state()
    state["layers.0.ffn.fc1.weight"][1, 1] = value
    with pytest.raises(UserError, match=r"weights\.pt holds .* not finite: layers\.0\.ffn\.fc1\.w"):
        main(files(state))
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_does_not_fit_is_refused(files, stack_state, tmp_path):
    words = [*files(stack_state(vocab=265)), "--tokenizer", "bytes"]
    with pytest.raises(UserError, match=r"has 265 rows, but --tokenizer bytes .* for 264 rows"):
        main(words)
    words = [*files(stack_state("encoder."), encoder_fields()), "--tokenizer", "bytes"]
    with pytest.raises(UserError, match=r"makes a run of a decoder, .* \(encoder\); leave"):
        main(words)
    assert not (tmp_path / "run").exists()


def test_a_configuration_that_cannot_be_read_is_refused(files, stack_state, tmp_path):
    words = files(stack_state())
    (tmp_path / "fields.json").write_text("[1]")
    with pytest.raises(ConfigError, match="--torchscale-config fields.json holds a list"):
        main(words)
