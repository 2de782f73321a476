import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scalerun.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from scalerun.data.length_batches import BatchLimits
from scalerun.data.loader import valid_batches
from scalerun.data.tokenizers.tokenizer_training import train_sentencepiece
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.models import ARCH_REGISTRY
from scalerun.tasks.base_task import TASK_REGISTRY, setup_task

CPU = torch.device("cpu")
SMALL = {
    "encoder_embed_dim": 16, "encoder_attention_heads": 2, "encoder_ffn_embed_dim": 16,
    "encoder_layers": 1, "decoder_embed_dim": 16, "decoder_attention_heads": 2,
    "decoder_ffn_embed_dim": 16, "decoder_layers": 1,
}  # fmt: skip


@pytest.fixture
def make_task(tmp_path, parallel_corpus):
    def make(**settings):
        settings = {
            "data": str(parallel_corpus), "source_lang": "en", "target_lang": "es",
            "tokenizer": "bytes", **settings,
        }  # fmt: skip
        cfg = TASK_REGISTRY.config_for("translation").replace(**settings)
        cfg.validate()
        return setup_task(
            cfg, seed=1, cache_dir=tmp_path / "run/cache", quarantine=tmp_path / "run/bad.jsonl"
        )

    return make


@pytest.fixture
def two_tokenizers(tmp_path, parallel_corpus):
    """Settings of two sentencepiece models of one name and of other sizes."""
    settings = {"tokenizer": None}
    for side, language, size in (("source", "en", 288), ("target", "es", 280)):
        path = tmp_path / side / "spm.model"
        path.parent.mkdir()
        text = (parallel_corpus / f"train.{language}").read_text(encoding="utf-8")
        path.write_bytes(
            train_sentencepiece([text], vocab_size=size, model_type="bpe", character_coverage=1.0)
        )
        settings[f"{side}_tokenizer"] = str(path)
    return settings


def model_cfg(arch="mt_tiny", **changes):
    return ARCH_REGISTRY.config_for(arch).replace(**SMALL, **changes)


def test_one_tokenizer_serves_both_sides(make_task):
    task = make_task()
    assert task.source_tokenizer is task.tokenizer
    model = task.build_model(model_cfg(), seed=1, device=CPU)
    assert model.encoder.embedding.tokens is model.decoder.embedding.tokens


def test_two_vocabularies_have_two_embeddings(make_task, two_tokenizers):
    task = make_task(**two_tokenizers)
    model = task.build_model(model_cfg(share_all_embeddings=False), seed=1, device=CPU)
    sizes = [len(t.dictionary) for t in (task.source_tokenizer, task.tokenizer)]
    assert sizes == [288, 280]
    assert [len(side.embedding.tokens.weight) for side in (model.encoder, model.decoder)] == sizes
    [batch] = valid_batches(limited(task).load_dataset("valid"), batch_size=1)
    assert model(**batch.net_input()).logits.shape[-1] == 280
    with pytest.raises(ConfigError, match="--share-all-embeddings needs one vocabulary"):
        task.build_model(model_cfg(), seed=1, device=CPU)


def limited(task, sentences=6):
    limits = BatchLimits(max_sentences=sentences)
    task.set_batch_limits(train=limits, valid=limits)
    return task


def test_padding_of_the_source_is_that_of_its_own_vocabulary(make_task, two_tokenizers):
    task = make_task(**two_tokenizers)
    task.source_tokenizer.dictionary = replace(task.source_tokenizer.dictionary, pad=0)
    model = task.build_model(model_cfg(share_all_embeddings=False), seed=1, device=CPU)
    assert (model.padding_idx, model.target_padding_idx) == (0, 1)


def test_a_decoder_alone_is_refused(make_task):
    with pytest.raises(ConfigError, match="--arch lm_tiny has no encoder"):
        make_task().build_model(ARCH_REGISTRY.config_for("lm_tiny"), seed=1, device=CPU)


def test_pairs_are_compared_with_the_positions_of_the_model(make_task):
    task = make_task()
    task.build_model(model_cfg(max_source_positions=8), seed=1, device=CPU)
    with pytest.raises(UserError, match=r"train.en:\d+: \d+ tokens are above --max-source-positi"):
        task.load_dataset("train")


def test_training_data_is_shuffled_and_validation_data_is_not(make_task):
    task = limited(make_task())
    assert task.load_dataset("train").recipe.seed == 1
    assert task.load_dataset("valid").recipe.seed is None
    assert task.sequence_length > 1
    events = [(report["event"], report["subset"]) for report in task.data_report()]
    assert events == [("data", "train"), ("data", "valid")]
    assert task.data_report() == []


def test_a_batch_of_nothing_costs_nothing_and_has_finite_gradients(make_task):
    task = limited(make_task())
    model = task.build_model(model_cfg(), seed=1, device=CPU)
    batch = task.load_dataset("train").collate([], [])
    output = CrossEntropy(CrossEntropyConfig())(model, batch)
    output.loss_sum.backward()
    assert output.loss_sum.item() == 0
    assert all(not param.grad.any() for param in model.parameters() if param.grad is not None)


def test_padding_changes_no_number(make_task):
    task = limited(make_task())
    model = task.build_model(model_cfg(), seed=1, device=CPU).eval()
    dataset = task.load_dataset("valid")
    criterion = CrossEntropy(CrossEntropyConfig())
    [whole] = dataset.shard(1, 0)
    together = criterion(model, dataset.collate([whole], [0])).loss_sum
    apart = sum(
        criterion(model, dataset.collate([replace(whole, members=whole.members[i : i + 1])], [0]))
        .loss_sum for i in range(6)
    )  # fmt: skip
    assert together.item() == pytest.approx(apart.item(), rel=1e-5)


def test_a_checkpoint_has_both_tokenizers(make_task, two_tokenizers, tmp_path):
    task = make_task(**two_tokenizers)
    assets = task.assets()
    assert set(assets) == {"source-spm.model", "target-spm.model"}
    for name, path in assets.items():
        (tmp_path / name).write_bytes(Path(path).read_bytes())
    cfg = task.with_assets(task.cfg, tmp_path)
    again = make_task(
        **{n: getattr(cfg, n) for n in ("source_tokenizer", "target_tokenizer")}, tokenizer=None
    )
    again.load_state_dict(task.state_dict())
    assert make_task().assets() == {}
    assert task.with_assets(make_task().cfg, tmp_path).tokenizer == "bytes"
    swapped = dict(zip(two_tokenizers, [None, *list(two_tokenizers.values())[:0:-1]], strict=True))
    with pytest.raises(UserError, match="another vocabulary"):
        make_task(**swapped).load_state_dict(task.state_dict())
    other_source = {**two_tokenizers, "source_tokenizer": two_tokenizers["target_tokenizer"]}
    with pytest.raises(UserError, match="another source vocabulary"):
        make_task(**other_source).load_state_dict(task.state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": ""}, "the data folder is missing"),
        ({"source_lang": None}, "--source-lang is required"),
        ({"target_lang": None}, "--target-lang is required"),
        ({"target_lang": "en"}, "--source-lang and --target-lang are both en"),
        ({"tokenizer": None}, "--tokenizer is required for a joint vocabulary"),
        ({"tokenizer": None, "source_tokenizer": "bytes"}, "--tokenizer is required for a joint"),
        ({"source_tokenizer": "bytes"}, "--tokenizer is for both sides"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(make_task, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_task(**settings)


def test_a_missing_tokenizer_is_named_by_its_flag(make_task):
    with pytest.raises(UserError, match="--source-tokenizer no.model does not exist"):
        make_task(tokenizer=None, source_tokenizer="no.model", target_tokenizer="bytes")


WORDS = [
    "--task", "translation", "-s", "en", "-t", "es", "--tokenizer", "bytes", "--arch", "mt_tiny",
    "--encoder-layers", "1", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16",
    "--decoder-layers", "1", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16",
    "--dropout", "0.1", "--max-tokens", "200", "--lr", "0.01", "--log-interval", "1", "--cpu",
    "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "1",
    "--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1",
]  # fmt: skip


def test_a_run_counts_pairs_and_goes_on_where_it_stopped(run, parallel_corpus, records, tmp_path):
    for name, stops in (("straight", ["6"]), ("resumed", ["2", "6"])):
        for updates in stops:
            words = ["--max-update", updates, "--save-dir", name, "--num-workers", "1"]
            command = run("train", parallel_corpus, *WORDS, *words)
            assert command.code == 0, command.stderr
    losses = {
        name: [
            (r["num_updates"], r["loss"], r["nll_loss"]) for r in records(tmp_path / name, "train")
        ]
        for name in ("straight", "resumed")
    }
    assert losses["resumed"] == losses["straight"]
    train = [r for r in records(tmp_path / "straight", "train") if r["epoch"] == 1]
    [data] = records(tmp_path / "straight", "event", event="data", subset="train")
    assert len(train) == data["batches"]
    assert sum(r["bsz"] for r in train) == data["pairs"] == 46
    assert sum(r["wpb"] for r in train) == data["tokens"]
    for record in records(tmp_path / "straight", None):
        if "loss" in record:
            assert record["nll_loss"] != record["loss"]
            assert record["ppl"] == pytest.approx(2 ** record["nll_loss"])
    other = run(
        "train",
        parallel_corpus,
        *WORDS,
        "--max-update",
        "8",
        "--save-dir",
        "straight",
        "--max-tokens",
        "100",
    )
    assert other.code == 1
    assert "--max-tokens (200, now 100) changed since" in other.error


def test_validation_does_not_depend_on_the_size_of_a_batch(run, parallel_corpus, tmp_path):
    words = ["--max-update", "1", "--save-dir", "run"]
    assert run("train", parallel_corpus, *WORDS, *words).code == 0
    found = []
    for size in (["--batch-size", "1"], ["--max-tokens", "120"], []):
        command = run("validate", "--path", "run", "--cpu", "--json", "v.json", *size)
        assert command.code == 0, command.stderr
        found.append(json.loads((tmp_path / "v.json").read_text())["valid"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0] == pytest.approx(found[2], rel=1e-6)
    command = run("validate", "--path", "run", "--cpu", "--valid-subset", "test")
    assert "test.en is missing" in command.error
