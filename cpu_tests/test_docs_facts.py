"""What the documentation says is so: its tables and listings are compared with the program."""

import importlib
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from scalerun.dataclass.foreign_flags import LEFT_OUT, READ_AS, REFUSED, VALUES_READ_AS
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.models import ARCH_REGISTRY
from scalerun.models.torchscale.moe import MOE
from scalerun.models.torchscale.translate import DECODER, SHARED
from scalerun.models.transformer_config import TransformerConfig

DOCS = Path(__file__).parents[1] / "docs"


def page(name):
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def section(text, title):
    """A page's part under one heading."""
    return re.split(r"^## ", text.split(f"\n## {title}\n")[1], flags=re.M)[0]


def rows(text):
    """Cells of the table rows of a text, headings left out."""
    found = []
    for line in text.splitlines():
        if line.startswith("|"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return [row for row in found if not set(row[0]) <= set("-")]


def names(text):
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", text)


def listed(text):
    """Names in a listing of a folder."""
    block = re.search(r"^```text\n(.*?)^```$", text, re.M | re.S)[1]
    return {line.split()[0].rstrip("/") for line in block.splitlines()[1:]}


@pytest.fixture(scope="module")
def run_folder(undisturbed):
    return undisturbed("facts", ["--max-update", "4", "--validate-interval-updates", "2"])


def test_the_fields_of_the_records_are_those_on_the_page(run_folder, records):
    text = section(page("training"), "Records")
    documented = {name for row in rows(text)[1:] for name in names(row[0])}
    assert set(records(run_folder, "train")[0]) == documented
    assert set(records(run_folder, "valid")[0]) <= set(names(text))
    events = {record["event"] for record in records(run_folder, "event")}
    assert events == {"data", "saved"}
    assert events <= set(names(text))


def test_the_files_of_a_run_folder_are_those_on_the_page(run_folder):
    found = {re.sub(r"checkpoint_\d+", "checkpoint_2000", p.name) for p in run_folder.iterdir()}
    assert found == listed(section(page("training"), "What a run folder holds"))


def test_the_files_of_a_checkpoint_are_those_on_the_page(run, corpus, tiny, tmp_path):
    made = run("train_tokenizer", corpus, "--vocab-size", "300", "--output", "t.model")
    assert made.code == 0, made.stderr
    words = [*tiny, "--tokenizer", "t.model", "--max-update", "1", "--save-dir", "run"]
    assert run("train", corpus, *words).code == 0
    found = {path.name for path in (tmp_path / "run/checkpoint_1").iterdir()}
    assert found == listed(section(page("checkpoints"), "What a checkpoint consists of"))


def test_the_keys_of_the_json_files_are_those_on_the_pages(run, run_folder, tmp_path):
    score = run("validate", "--path", run_folder, "--cpu", "--json", "v.json", cwd=tmp_path)
    assert score.code == 0, score.stderr
    always = [row for row in rows(page("validation"))[1:] if not row[1].endswith(" only")]
    documented = [names(row[0])[0] for row in always]
    for numbers in json.loads((tmp_path / "v.json").read_text()).values():
        assert list(numbers) == documented
    ask = run("interactive_cli", "--path", run_folder, "--cpu", "--json", stdin="the\n")
    documented = [name for row in rows(section(page("generation"), "JSON"))[1:] for name in row[:1]]
    assert list(json.loads(ask.stdout)) == [key for cell in documented for key in names(cell)]


def test_the_parameters_of_generation_are_those_on_the_page():
    table = rows(section(page("generation"), "Parameters"))[1:]
    documented = [name for row in table for name in names(row[0])]
    assert sorted(documented) == sorted(field.name for field in fields(SamplingParams))


def test_the_presets_are_those_on_the_page():
    presets = {}
    for row in rows(section(page("architectures"), "Presets"))[1:]:
        for name in names(row[0]):
            presets[name] = [int(cell) for cell in row[1:6]]
    assert set(presets) == set(ARCH_REGISTRY.names())
    for name, numbers in presets.items():
        stack = ARCH_REGISTRY.config_for(name).stacks()[-1]
        assert numbers == [
            stack.num_layers,
            stack.dim,
            stack.num_heads,
            stack.ffn_dim,
            stack.max_positions,
        ]


def test_torchscales_names_and_ours_are_those_on_the_page():
    text = section(page("architectures"), "TorchScale's names")
    theirs, ours = text.split("Where scalerun differs")
    settings = {field.name for field in fields(TransformerConfig)}
    shared = {*DECODER, *SHARED, *MOE, "decoder_normalize_before"}
    assert set(names(theirs.split("These have its meaning:")[1])) == shared
    assert set(names(ours.split("These are ours:")[1])) == settings - shared


HARMLESS = [
    "--num-workers", "1", "--data-buffer-size", "3", "--cache-dir", "cache", "--log-file", "log",
    "--profile", "--profile-updates", "2,3", "--validate-interval-updates", "2", "--store-ema",
    "--save-interval-updates", "3", "--keep-last-updates", "1", "--no-save-async",
    "--checkpoint-activations", "--checkpoint-activations-interval", "2",
    "--recompute", "selective",
]  # fmt: skip


def test_settings_that_the_page_calls_harmless_change_no_bit(run, corpus, tiny, records, tmp_path):
    text = section(page("training"), "Which settings change the result")
    flags = ("--num-workers", "--data-buffer-size", "--cache-dir", "--checkpoint-activations")
    for flag in (*flags, "--recompute"):
        assert flag in HARMLESS
        assert flag in names(text)
    series = []
    for save_dir, words in (("plain", ["--disable-validation", "--no-save"]), ("busy", HARMLESS)):
        command = run("train", corpus, *tiny, *words, "--max-update", "6", "--save-dir", save_dir)
        assert command.code == 0, command.stderr
        train = records(tmp_path / save_dir, "train")
        series.append([(r["num_updates"], r["loss"], r["gnorm"], r["lr"]) for r in train])
    assert len(series[0]) == 6
    assert series[0] == series[1]


def test_what_an_epoch_trains_on_adds_up(run, corpus, tiny, records, tmp_path):
    words = ["--max-epoch", "1", "--lr-scheduler", "constant", "--save-dir", "run"]
    assert run("train", corpus, *tiny, *words).code == 0
    score = run("validate", "--path", "run", "--cpu", "--valid-subset", "train", "--json", "v.json")
    assert score.code == 0, score.stderr
    tokens = json.loads((tmp_path / "v.json").read_text())["train"]["tokens"]
    text = [json.loads(line)["text"] for line in _lines(corpus / "train")]
    assert tokens == sum(len(each.encode()) + 1 for each in text)
    assert records(tmp_path / "run", "train")[-1]["tokens_seen"] == tokens
    [data] = records(tmp_path / "run", "event", event="data")[:1]
    parts = ("lines_blank", "lines_empty", "lines_quarantined", "lines_documents")
    assert data["lines"] == sum(data[part] for part in parts)


def test_a_training_set_is_scored_whole_whatever_it_was_trained_with(run, corpus, tiny, tmp_path):
    """Weights, shuffling and cut-off documents belong to training alone."""
    words = ["--corpus-weights", "verse=1", "--sample-break-mode", "eos", "--max-update", "1"]
    assert run("train", corpus, *tiny, *words, "--save-dir", "run").code == 0
    score = run("validate", "--path", "run", "--cpu", "--valid-subset", "train", "--json", "v.json")
    assert score.code == 0, score.stderr
    text = [json.loads(line)["text"] for line in _lines(corpus / "train")]
    numbers = json.loads((tmp_path / "v.json").read_text())["train"]
    assert numbers["tokens"] == sum(len(each.encode()) + 1 for each in text)


def test_a_training_set_of_any_name_is_shuffled(run, corpus, tiny, records, tmp_path):
    series = []
    for name in ("train", "tales"):
        if name == "tales":
            (corpus / "train").rename(corpus / "tales")
        words = ["--train-subset", name, "--max-update", "3", "--save-dir", name]
        command = run("train", corpus, *tiny, *words)
        assert command.code == 0, command.stderr
        series.append([r["loss"] for r in records(tmp_path / name, "train")])
    assert series[0] == series[1]


def _lines(folder):
    files = sorted(folder.rglob("*.jsonl"))
    return [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def test_every_foreign_flag_is_on_the_page():
    text = section(page("migrating"), "From fairseq and metaseq")
    told = {(tuple(names(row[0])), *row[1:]) for row in rows(text)}

    def plain(flags):
        return tuple(flag.rstrip("=") for flag in flags.split())

    for name, (read_as, why) in READ_AS.items():
        assert (plain(name), f"`{read_as.rstrip('=')}`", why) in told
    for (name, value), (read_as, why) in VALUES_READ_AS.items():
        assert ((f"{name} {value}",), f"`{name} {read_as}`", why) in told
    for flags, why in (LEFT_OUT | REFUSED).items():
        assert (plain(flags), why) in told


def test_every_class_for_newcomers_exists():
    text = section(page("migrating"), "From fairseq and metaseq")
    found = [name for row in rows(text) for name in names(row[-1]) if name.startswith("scalerun.")]
    assert len(found) > 15
    for name in found:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
