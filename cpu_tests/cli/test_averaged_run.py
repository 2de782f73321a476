"""Which checkpoints have a mean."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch

from scalerun.checkpoint.atomic import FileRecord, hash_file
from scalerun.checkpoint.manifest import read_manifest
from scalerun.checkpoint.reader import find_checkpoint, read_state
from scalerun.cli.averaged_run import SOURCE_FILE, average_runs
from scalerun.cli.converted_run import ConvertedModel, write_run
from scalerun.cli.inference import load_model
from scalerun.dataclass.errors import UserError
from scalerun.models.base_model import build_model
from scalerun.models.transformer_config import TransformerConfig

SIZES = {
    "decoder_layers": 1,
    "decoder_embed_dim": 8,
    "decoder_ffn_embed_dim": 8,
    "decoder_attention_heads": 2,
}


@pytest.fixture
def make(tmp_path):
    """A run of an untrained model of bytes -> its folder."""

    def make(name, *, seed=1, vocab_size=264, tokenizer="bytes", **changes):
        cfg = TransformerConfig(**SIZES | changes)
        cpu = torch.device("cpu")
        model = build_model(cfg, vocab_size=vocab_size, padding_idx=None, seed=seed, device=cpu)
        converted = ConvertedModel(model, cfg, "transformer_lm", vocab_size, {})
        named = None if tokenizer is None else {"tokenizer": tokenizer}
        write_run(converted, tmp_path / name, vocabulary=named, words=[])
        return tmp_path / name

    return make


@pytest.fixture
def average(tmp_path):
    def average(*folders):
        paths = [str(folder) for folder in folders]
        return average_runs(paths, tmp_path / "mean", last=None, user_dir=None, words=["average"])

    return average


def rewrite(checkpoint, name, change):
    """Change a JSON file of a checkpoint, and the manifest with it."""
    path = checkpoint / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    manifest = read_manifest(checkpoint)
    record = FileRecord(path.stat().st_size, hash_file(path))
    replace(manifest, files=manifest.files | {name: record}).rewrite(checkpoint)


def test_runs_of_other_seeds_have_a_mean(make, average):
    runs = [make("a"), make("b", seed=2), make("c", seed=3)]
    checkpoint, folders = average(*runs)
    assert folders == [run / "checkpoint_0" for run in runs]
    table = "embedding.tokens.weight"
    tables = torch.stack([load_model(run).state_dict()[table].double() for run in runs])
    assert torch.equal(load_model(checkpoint).state_dict()[table], tables.mean(0).float())


def test_it_keeps_what_the_weights_depend_on_and_nothing_of_a_training(make, average):
    run = make("a")
    checkpoint, _ = average(run, make("b", seed=2))
    state = read_state(checkpoint)
    assert state.keys() == {"architecture", "task", "model", "trainer"}
    assert state["task"] == read_state(run / "checkpoint_0")["task"]
    names = {path.name for path in checkpoint.iterdir() if path.suffix == ".json"}
    assert names == {"manifest.json", "state.json", "config.json", SOURCE_FILE}
    record = json.loads((checkpoint / SOURCE_FILE).read_text())
    assert [source["path"] for source in record["mean_of"]] == [
        str(run / "checkpoint_0"),
        str(run.parent / "b/checkpoint_0"),
    ]
    assert record["mean_of"][0]["manifest_sha256"] == hash_file(run / "checkpoint_0/manifest.json")
    assert "scalerun.cli.checkpoint average" in (checkpoint.parent / "command.txt").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_attention_heads": 4}, "with --decoder-attention-heads 4, and .* with 2"),
        ({"activation_fn": "relu"}, "with --activation-fn relu, and .* with gelu"),
        ({"decoder_layers": 2}, "with --decoder-layers 2, and .* with 1"),
    ],
)
def test_other_architectures_have_none(make, average, tmp_path, changes, message):
    with pytest.raises(UserError, match=rf"b/checkpoint_0 was trained {message}; only"):
        average(make("a"), make("b", **changes))
    assert not (tmp_path / "mean").exists()


def test_settings_that_leave_the_function_as_it_is_may_differ(make, average):
    average(make("a"), make("b", seed=2, dropout=0.3))


def test_a_setting_that_an_older_checkpoint_lacks_has_its_default(make, average):
    old = make("b", seed=2)
    rewrite(old / "checkpoint_0", "config.json", lambda c: c["model"].pop("rms_norm"))
    average(make("a"), old)


def test_other_tensors_under_the_same_settings_have_none(make, average):
    """As plug-in code makes them that was changed between two runs."""
    other = make("b", decoder_layers=2)
    rewrite(other / "checkpoint_0", "config.json", lambda c: c["model"].update(decoder_layers=1))
    message = r"layers\.1\.mixer_residual\.norm\.weight is \(8,\) float32, not missing"
    with pytest.raises(UserError, match=message):
        average(make("a"), other)


def test_other_vocabularies_of_the_source_have_none(make, average):
    first, other = make("a"), make("b", seed=2)
    for run, digest in ((first, "1" * 64), (other, "2" * 64)):
        own = {"source_vocabulary": digest, "source_vocabulary_size": 16}
        rewrite(run / "checkpoint_0", "state.json", lambda s, own=own: s["task"].update(own))
    message = r"another source vocabulary than .* \(16 and 16 symbols\)"
    with pytest.raises(UserError, match=message):
        average(first, other)


def test_other_vocabularies_have_none(make, average):
    other = make("b", seed=2)
    rewrite(other / "checkpoint_0", "state.json", lambda s: s["task"].update(vocabulary="0" * 64))
    with pytest.raises(UserError, match=r"another vocabulary than .* \(264 and 264 symbols\)"):
        average(make("a"), other)


def test_a_vocabulary_that_is_not_known_is_taken_on_trust(make, average, caplog):
    with caplog.at_level(logging.WARNING):
        average(make("a"), make("b", seed=2, tokenizer=None))
    assert "is taken on trust" in caplog.text


def test_a_checkpoint_counts_once(make, average):
    run = make("a")
    with pytest.raises(UserError, match="a/checkpoint_0 is named twice"):
        average(run, find_checkpoint(run))


def test_a_folder_that_cannot_be_made_is_named(make, tmp_path):
    (tmp_path / "file").write_text("")
    paths = [str(make("a")), str(make("b", seed=2))]
    with pytest.raises(UserError, match="--output .*file/mean cannot be written"):
        average_runs(paths, tmp_path / "file/mean", last=None, user_dir=None, words=[])
