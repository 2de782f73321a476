"""BLEU in validation: the number is sacreBLEU's, and the same at every layout."""

import json
import sys

import pytest
import sacrebleu
import torch

from cpu_tests.conftest import make_parallel_corpus
from cpu_tests.layouts.training import ARCHITECTURES, make_trainer
from cpu_tests.world import run_world
from scalerun.dataclass.errors import ConfigError
from scalerun.tasks.base_task import TASK_REGISTRY

WORDS = [*ARCHITECTURES["encoder-decoder"], "--eval-bleu", "--eval-bleu-tokenize", "char"]
EXPERTS = ["--moe-freq", "2", "--moe-expert-count", "4", "--criterion", "moe_cross_entropy"]
LAYOUTS = {
    "sharded": (2, []),
    "copied": (2, ["--ddp-backend", "pytorch_ddp"]),
    "shared products": (1, ["--model-parallel-size", "2"]),
}
UPDATES = 40


@pytest.fixture
def data(tmp_path):
    return make_parallel_corpus(tmp_path / "data")


@pytest.fixture
def trained(data, tmp_path):
    """Makes a run of a few updates and returns its last validation record."""

    def trained(name, *words):
        home = tmp_path / name
        trainer = make_trainer(data, home, [*WORDS, *words], updates=UPDATES)
        with trainer.parts.sinks, trainer.parts.checkpoints:
            trainer.train()
        lines = (home / "metrics.jsonl").read_text().splitlines()
        return [r for r in map(json.loads, lines) if r["kind"] == "valid"][-1]

    return trained


def scores_of(data, home, restore, words, *, data_size):
    """Of the weights of another run."""
    words = [*WORDS, *words, "--restore-file", str(restore), "--no-save"]
    trainer = make_trainer(data, home, words, updates=UPDATES, data_size=data_size)
    trainer.resume()
    [result] = trainer.score()
    trainer.model.train()
    again = trainer.forward_backward(next(trainer.loader.updates())[0], 0, 1)
    assert torch.isfinite(again.loss_sum)
    return result.scores


@pytest.mark.long
def test_bleu_is_the_same_at_every_layout(data, trained, tmp_path):
    """Five pairs in batches of two: a rank of two has one batch less to translate."""
    for ending in ("en", "es"):
        path = data / f"valid.{ending}"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    record = trained("dense")
    experts = trained("moe", *EXPERTS)
    assert record["chrf"] > 0

    def work(rank):
        found = {}
        for name, (data_size, flags) in LAYOUTS.items():
            home = tmp_path / f"{name} {rank}"
            found[name] = scores_of(data, home, tmp_path / "dense", flags, data_size=data_size)
        flags = [*EXPERTS, "--expert-parallel-size", "2"]
        home = tmp_path / f"experts {rank}"
        found["experts"] = scores_of(data, home, tmp_path / "moe", flags, data_size=2)
        return found

    for found in run_world(2, work, timeout=250):
        for name, scores in found.items():
            expected = experts if name == "experts" else record
            assert scores == pytest.approx({m: expected[m] for m in ("bleu", "chrf")}), name


def test_bleu_is_that_of_the_translations_of_the_set(data, tmp_path):
    trainer = make_trainer(data, tmp_path / "run", [*WORDS, "--no-save"], updates=UPDATES)
    trainer.train()
    [result] = trainer.score()
    task = trainer.task
    scorer = task.build_scorer(trainer.model, trainer.ranks)
    end = task.dictionary.eos
    sources = (data / "valid.en").read_text().splitlines()
    references = (data / "valid.es").read_text().splitlines()
    tokens = [[*task.source_tokenizer.encode(text), end] for text in sources]
    hypotheses = [answers[0].text for answers in scorer.translator.translate(tokens)]
    expected = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="char")
    assert result.scores["bleu"] == pytest.approx(expected.score)
    assert result.scores["chrf"] == pytest.approx(
        sacrebleu.corpus_chrf(hypotheses, [references]).score
    )
    assert result.record()["bleu"] == result.scores["bleu"]


def test_the_best_checkpoint_has_the_highest_bleu(data, tmp_path):
    words = [
        *WORDS, "--best-checkpoint-metric", "chrf", "--maximize-best-checkpoint-metric",
        "--validate-interval-updates", "10", "--validate-interval", "0",
    ]  # fmt: skip
    trainer = make_trainer(data, tmp_path / "run", words, updates=UPDATES)
    with trainer.parts.sinks, trainer.parts.checkpoints:
        trainer.train()
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    seen = [r["chrf"] for r in map(json.loads, lines) if r["kind"] == "valid"]
    assert len(set(seen)) > 1
    assert trainer.progress.best_metric == max(seen)
    assert trainer.checkpoints.best_metric() == max(seen)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [*WORDS, "--best-checkpoint-metric", "bleu"],
            "--best-checkpoint-metric bleu is better where it is larger; add --maximize",
        ),
        (
            [*ARCHITECTURES["encoder-decoder"], "--best-checkpoint-metric", "bleu"],
            "bleu is measured with --task translation and --eval-bleu alone",
        ),
    ],
)
def test_a_metric_that_cannot_be_judged_is_refused(data, tmp_path, words, message):
    with pytest.raises(ConfigError, match=message):
        make_trainer(data, tmp_path / "run", words, updates=1)


def test_without_sacrebleu_training_does_not_begin(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ConfigError, match="--eval-bleu needs the sacrebleu package: pip install"):
        make_trainer(data, tmp_path / "run", WORDS, updates=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_bleu_beam": 4}, "--eval-bleu-beam has no effect without --eval-bleu"),
        ({"eval_bleu": True, "eval_bleu_beam": 0}, "--eval-bleu-beam is 0"),
        ({"eval_bleu": True, "eval_bleu_max_len_a": -1.0}, "--eval-bleu-max-len-a is -1"),
        (
            {"eval_bleu": True, "eval_bleu_beam": 1, "eval_bleu_lenpen": 0.5},
            "--eval-bleu-lenpen 0.5 ranks the hypotheses of a search",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused(settings, message):
    cfg = TASK_REGISTRY.config_for("translation").replace(
        data="d", source_lang="en", target_lang="es", tokenizer="bytes", **settings
    )
    with pytest.raises(ConfigError, match=message):
        cfg.validate()
