"""The verbs, on the checkpoints of a real run."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from scalerun.cli.checkpoint import VERBS, main
from scalerun.cli.convert import main as convert
from scalerun.cli.inference import load_for_inference, load_model
from scalerun.cli.validate import main as validate
from scalerun.dataclass.errors import ConfigError, UserError

RESETS = ["--reset-optimizer", "--reset-lr-scheduler", "--reset-meters", "--reset-dataloader"]


@pytest.fixture(scope="module")
def trained(undisturbed):
    """A run folder with checkpoints 2, 4 and 6, weights averaged in training, and its data."""
    return undisturbed(
        "verbs", ["--max-update", "6", "--save-interval-updates", "2", "--store-ema"]
    )


@pytest.fixture
def verb(trained, tmp_path, monkeypatch, capsys):
    """Run a verb on a copy of the run; give what it printed."""
    shutil.copytree(trained, tmp_path / "run")
    monkeypatch.chdir(tmp_path)

    def verb(*words, code=0):
        capsys.readouterr()
        assert main([str(word) for word in words]) == code
        return capsys.readouterr().out

    return verb


def weights(path):
    model = load_model(path)
    return {name: t.detach() for name, t in model.state_dict().items()}


def test_a_checkpoint_is_described(verb):
    text = verb("inspect", "run")
    assert text.startswith("run/checkpoint_6\nupdate        6\nepoch         1\n")
    assert "architecture  transformer_lm\n              decoder_embed_dim 16\n" in text
    numel = sum(t.numel() for t in weights("run").values())
    assert f"parameters    {numel:,}\n" in text
    assert re.search(r"^written by    scalerun \S+, torch \S+, 1 process$", text, re.M)
    assert re.search(rf"^model +\d+ +{numel:,} +{4 * numel:,}  float32$", text, re.M)
    assert re.search(r"^optimizer +\d+", text, re.M)


def test_the_tensors_of_a_part_are_listed(verb):
    rows = [line.split("  ") for line in verb("inspect", "run", "--part", "model").splitlines()]
    found = {row[0]: [cell.strip() for cell in row[1:] if cell] for row in rows[1:]}
    expected = {
        name: [" x ".join(map(str, t.shape)), "float32"] for name, t in weights("run").items()
    }
    assert found == expected
    assert "embedding.tokens.weight.exp_avg " in verb("inspect", "run", "--part", "optimizer")


def test_json_has_everything_by_name(verb):
    facts = json.loads(verb("inspect", "run/checkpoint_4", "--json", "--part", "ema"))
    assert (facts["num_updates"], facts["world_size"], facts["epoch"]) == (4, 1, 1)
    assert facts["architecture"]["decoder_layers"] == 2
    assert facts["parts"]["trainer"] == 0
    assert facts["parts"]["ema"] == len(facts["tensors"]) == len(weights("run"))
    assert {t["dtype"] for t in facts["tensors"]} == {"float32"}
    assert "tensors" not in json.loads(verb("inspect", "run", "--json"))


def test_every_checkpoint_gets_a_line_and_a_damaged_one_the_exit_code(verb):
    lines = verb("verify", "run").splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"run/checkpoint_{n}" for n in (2, 4, 6)]
    assert all(re.search(r": whole \([\d,]+ bytes in 4 files\)$", line) for line in lines)
    with open("run/checkpoint_4/config.json", "r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    lines = verb("verify", "run", code=1).splitlines()
    assert lines[1] == "run/checkpoint_4: DAMAGED: the content of config.json has changed"
    assert ": whole (" in lines[0] + lines[2]
    assert ": whole (" in verb("verify", "run/checkpoint_6")


def test_one_file_holds_the_weights_bit_for_bit(verb):
    verb("consolidate", "run", "--output", "new/weights.safetensors")
    loaded = load_file("new/weights.safetensors")
    expected = weights("run")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    with safe_open("new/weights.safetensors", "pt") as file:
        metadata = file.metadata()
    assert (metadata["format"], metadata["num_updates"]) == ("pt", "6")
    assert json.loads(metadata["architecture"])["decoder_embed_dim"] == 16


def test_the_file_of_the_average_is_what_use_ema_loads(verb, trained):
    verb("consolidate", "run", "--part", "ema", "--output", "ema.safetensors")
    loaded = load_file("ema.safetensors")
    run = load_for_inference("run", device=torch.device("cpu"), use_ema=True)
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(loaded[name], tensor), name
    assert not torch.equal(
        loaded["embedding.tokens.weight"], weights("run")["embedding.tokens.weight"]
    )


def test_a_file_is_replaced_only_by_force(verb):
    words = ["consolidate", "run/checkpoint_2", "--output", "w.safetensors"]
    verb(*words, "--dtype", "bfloat16")
    before = load_file("w.safetensors")
    assert {t.dtype for t in before.values()} == {torch.bfloat16}
    with pytest.raises(UserError, match=r"--output w\.safetensors exists; give --force"):
        verb(*words)
    assert load_file("w.safetensors").keys() == before.keys()
    verb(*words, "--force")
    assert {t.dtype for t in load_file("w.safetensors").values()} == {torch.float32}


def test_a_damaged_checkpoint_is_not_passed_on(verb, tmp_path):
    (tmp_path / "run/checkpoint_6/__0_0.distcp").write_bytes(b"")
    for words in (
        ["consolidate", "run/checkpoint_6", "--output", "w.safetensors"],
        ["convert", "run/checkpoint_6", "--to", "torchscale", "--output", "w.safetensors"],
        ["average", "run/checkpoint_4", "run/checkpoint_6", "--output", "mean"],
        ["average", "run", "--last", "2", "--output", "mean"],
    ):
        with pytest.raises(UserError, match=r"checkpoint_6 is damaged: __0_0\.distcp has 0 bytes"):
            verb(*words)
    assert not (tmp_path / "w.safetensors").exists()
    assert not (tmp_path / "mean").exists()


def test_torchscales_names_come_back_as_the_same_checkpoint(verb):
    verb("convert", "run", "--to", "torchscale", "--output", "theirs.safetensors")
    words = ["theirs.safetensors", "--from", "torchscale", "--tokenizer", "bytes"]
    assert convert([*words, "--torchscale-config", "theirs.json", "--output", "back"]) == 0
    expected, found = weights("run"), weights("back")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_averaged_weights_go_to_torchscale_too(verb):
    verb("convert", "run", "--to", "torchscale", "--part", "ema", "--output", "theirs.safetensors")
    verb("consolidate", "run", "--part", "ema", "--output", "ema.safetensors")
    theirs, ours = load_file("theirs.safetensors"), load_file("ema.safetensors")
    assert torch.equal(theirs["embed_tokens.weight"], ours["embedding.tokens.weight"])


def test_a_mean_is_validated_asked_and_trained_on(verb, trained, run, tmp_path):
    verb("average", "run", "--last", "2", "--output", "mean")
    models = [weights(f"run/checkpoint_{n}") for n in (4, 6)]
    for name, tensor in weights("mean").items():
        exact = (models[0][name].double() + models[1][name].double()) / 2
        assert torch.equal(tensor, exact.float()), name
    data = trained.parent / "data"
    assert validate([str(data), "--path", "mean", "--cpu"]) == 0
    ask = run("interactive_cli", "--path", "mean", "--cpu", "--json", stdin="the\n")
    assert ask.code == 0, ask.stderr
    train = ["train", data, "--config", "mean/config.yaml", "--max-update", "1"]
    train += ["--save-dir", "tuned", "--restore-file", "mean"]
    tuned = run(*train, *RESETS)
    assert tuned.code == 0, tuned.stderr
    record = json.loads((tmp_path / "mean/checkpoint_6/averaged_from.json").read_text())
    assert [each["num_updates"] for each in record["mean_of"]] == [4, 6]
    assert record["mean_of"][0]["path"] == str(tmp_path / "run/checkpoint_4")


WRONG = {
    "no verb": ([], "the verb is missing"),
    "mistyped verb": (["inspct", "run"], "'inspct' is not a verb; did you mean inspect?"),
    "reshard": (["reshard", "run"], "verbs: inspect, verify, consolidate, average, convert"),
    "no path": (["verify"], "PATH is missing"),
    "two paths": (["inspect", "run", "run"], "'run' is not expected here"),
    "no output": (["consolidate", "run"], "name a file that ends in .safetensors"),
    "other suffix": (["consolidate", "run", "--output", "w.pt"], "--output is 'w.pt'"),
    "other format": (["consolidate", "run", "--dtype", "int8", "--output", "w"], "--dtype: 'int8'"),
    "no library": (["convert", "run", "--output", "w.safetensors"], "--to is required"),
    "other library": (["convert", "run", "--to", "hf", "--output", "w.safetensors"], "--to: 'hf'"),
    "mean without output": (["average", "run", "run"], "--output is required"),
    "mean of one": (["average", "run", "--output", "m"], "needs two checkpoints or more"),
    "last 1": (["average", "run", "--last", "1", "--output", "m"], "--last is 1; give 2 or more"),
    "last of two": (["average", "a", "b", "--last", "2", "--output", "m"], "--last takes one run"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_command_is_refused(case):
    words, message = WRONG[case]
    with pytest.raises(ConfigError, match=re.escape(message)):
        main(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "nowhere"], "PATH nowhere does not exist"),
        (["verify", "run/checkpoint_9"], "PATH run/checkpoint_9 does not exist; run has"),
        (["consolidate", "run", "--output", "run/config.yaml/w.safetensors"], "cannot be written"),
        (["average", "run/checkpoint_6", "run/checkpoint_last", "--output", "m"], "named twice"),
        (["average", "run", "--last", "5", "--output", "m"], "fewer than --last 5"),
        (["average", "run", "--last", "2", "--output", "run"], "--output run is not empty"),
    ],
)
def test_what_cannot_be_done_is_said(verb, words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        verb(*words)


def test_the_command_itself_ends_in_one_sentence(run):
    command = run("checkpoint", "verify", "nowhere")
    assert command.code == 1
    assert command.error.startswith("error: PATH nowhere does not exist; ")
    assert "Traceback" not in command.stderr


def test_help_lists_the_verbs_and_each_verb_its_flags(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb} " in text for verb in VERBS)
    for verb in VERBS:
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        assert f"scalerun-checkpoint {verb}" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("scalerun-checkpoint ")
