"""Laws of the loop: what an update is, when a run ends, and that looking changes nothing."""

import json

import pytest
import torch

from scalerun.cli import train as train_command
from scalerun.modules.moe.gates import XMoEGate
from scalerun.trainer import Trainer

CONSTANT = ["--lr-scheduler", "constant"]
EXPERTS = "--moe-freq 2 --moe-expert-count 4 --use-xmoe --criterion moe_cross_entropy".split()
EXPLODING = """
import torch
from dataclasses import dataclass
from scalerun.criterions import register_criterion
from scalerun.criterions.cross_entropy import CrossEntropy
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option

@dataclass
class ExplodingConfig(ScalerunDataclass):
    explode_at: list[int] = option([], "calls of the training loss that give infinity")

@register_criterion("exploding", ExplodingConfig)
class Exploding(CrossEntropy):
    calls = 0

    def forward(self, model, batch):
        output = super().forward(model, batch)
        if self.training:
            type(self).calls += 1
            if type(self).calls in self.cfg.explode_at:
                output.loss_sum = output.loss_sum * float("inf")
        return output
"""


@pytest.fixture
def train(corpus, tiny, tmp_path, monkeypatch, records):
    """Train in this process -> (exit code, training records, ids of each update's sequences)."""
    monkeypatch.chdir(tmp_path)

    def train(*words, save_dir="run"):
        consumed = []
        step = Trainer.train_step

        def watched(self, batches):
            consumed.append([i for batch in batches for i in batch.sample_ids])
            return step(self, batches)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "train_step", watched)
            code = train_command.main([str(corpus), *tiny, *words, "--save-dir", save_dir])
        return code, records(tmp_path / save_dir, "train"), consumed

    return train


def series(found, *keys):
    return [tuple(r[key] for key in keys or ("loss", "gnorm")) for r in found]


def assert_close(one, other, tolerance=1e-5):
    torch.testing.assert_close(
        torch.tensor(one, dtype=torch.float64),
        torch.tensor(other, dtype=torch.float64),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("cut", [("2", "4"), ("1", "8"), ("4", "2")])
def test_an_update_is_the_same_however_it_is_cut_into_batches(train, cut):
    """Also with documents that leave some batches fewer targets than others."""
    common = ["--dropout", "0", "--sample-break-mode", "complete", "--max-update", "6"]
    _, whole, ids = train(*common, "--batch-size", "8", save_dir="whole")
    _, parts, cut_ids = train(
        *common, "--batch-size", cut[0], "--update-freq", cut[1], save_dir="parts"
    )
    assert ids == cut_ids
    assert_close(series(whole), series(parts))
    assert series(whole, "tokens_seen", "wpb", "bsz") == series(parts, "tokens_seen", "wpb", "bsz")


def test_validation_and_saving_leave_the_training_bits_unchanged(train):
    _, plain, _ = train("--max-update", "12", "--disable-validation", "--no-save", save_dir="plain")
    _, watched, _ = train(
        "--max-update", "12", "--validate-interval-updates", "1", "--save-interval-updates", "1",
        "--batch-size-valid", "3", save_dir="watched",
    )  # fmt: skip
    assert series(plain) == series(watched)


def test_the_number_of_workers_changes_no_bit(train):
    runs = [
        train("--max-update", "14", "--num-workers", workers, save_dir=f"run{workers}")[1]
        for workers in ("0", "1", "2")
    ]
    assert series(runs[0]) == series(runs[1]) == series(runs[2])


def test_max_update_is_exact_and_max_epoch_sees_every_sequence_once(train):
    _, found, ids = train("--max-update", "5")
    assert [r["num_updates"] for r in found] == [1, 2, 3, 4, 5]
    _, found, ids = train("--max-epoch", "2", *CONSTANT, save_dir="epochs")
    flat = [i for update in ids for i in update]
    half = len(flat) // 2
    assert flat[:half] == flat[half:] == list(range(half))
    assert {r["epoch"] for r in found} == {1, 2}


def test_a_resumed_run_may_change_its_batch_size_and_goes_on_at_the_next_sequence(train):
    _, _, first = train("--max-update", "3", "--batch-size", "4")
    _, _, second = train("--max-update", "6", "--batch-size", "6")
    assert [i for update in first + second for i in update] == list(range(3 * 4 + 3 * 6))


def test_skip_batches_throws_data_away_and_keeps_update_numbers(train):
    _, found, ids = train("--max-update", "4", "--skip-batches", "2-3,4")
    assert [r["num_updates"] for r in found] == [1, 2, 3, 4]
    assert [update[0] // 4 for update in ids] == [0, 3, 4, 6]


@pytest.mark.parametrize(
    ("words", "updates"),
    [
        (["--stop-time-hours", "1e-9", *CONSTANT], 0),
        ([*CONSTANT, "--stop-min-lr", "0.02", "--max-update", "9"], 1),
        (["--patience", "2", "--validate-interval-updates", "1", *CONSTANT,
          "--lr", "1e-12", "--max-update", "50"], None),
    ],
)  # fmt: skip
def test_a_run_ends_when_told(train, words, updates):
    _, found, _ = train(*words)
    if updates is not None:
        assert len(found) == updates
    else:
        assert len(found) < 50


def test_the_end_says_what_prolongs_the_run_and_a_finished_run_that_nothing_is_left(train, capsys):
    for words, reason in (
        (["--max-update", "2"], "2 updates are done; raise --max-update to go on"),
        (
            ["--max-epoch", "1", *CONSTANT],
            "the end of epoch 1 is reached; raise --max-epoch to go on",
        ),
    ):
        train(*words, save_dir=words[0].strip("-"))
        assert f"training ends: {reason}\n" in capsys.readouterr().err
        train(*words, save_dir=words[0].strip("-"))
        assert f"nothing to do: {reason}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "missed"),
    [
        (["--lr", "0.02"], ", before the learning rate came down from 0.02 to 0"),
        (CONSTANT, ""),
    ],
)
def test_a_run_that_its_time_cuts_short_says_what_it_missed(train, capsys, words, missed):
    _, found, _ = train(*words, "--max-update", "100000", "--stop-time-hours", "1e-5")
    assert (
        f"stopped by --stop-time-hours 1e-05 at update {len(found)} of 100000{missed}; "
        "raise --stop-time-hours to go on\n"
    ) in capsys.readouterr().err


def test_update_freq_may_differ_by_epoch(train):
    _, found, _ = train("--max-epoch", "2", "--update-freq", "1,2", *CONSTANT)
    by_epoch = {epoch: max(r["bsz"] for r in found if r["epoch"] == epoch) for epoch in (1, 2)}
    assert by_epoch == {1: 4, 2: 8}


def test_records_have_their_names_and_are_numbers(train, tmp_path, records):
    train("--max-update", "4", "--validate-interval-updates", "2", "--clip-norm", "0.001")
    names = (
        "num_updates epoch loss ppl gnorm clip lr wps ups wpb bsz tokens_seen loss_scale train_wall"
        " bits_per_byte mfu tflops peak_memory_gib"
    ).split()
    for r in records(tmp_path / "run", "train"):
        assert all(isinstance(r[name], int | float) for name in names), r
        assert r["clip"] == 100.0
        assert r["ppl"] == pytest.approx(2 ** r["loss"])
    valid = records(tmp_path / "run", "valid")
    assert {r["subset"] for r in valid} == {"valid/first", "valid/second"}
    assert {r["num_updates"] for r in valid} == {2, 4}
    for r in valid:
        assert {"loss", "ppl", "bits_per_byte", "tokens"} <= r.keys()


def test_sparse_clipping_shows_its_parts(train):
    _, found, _ = train(*EXPERTS, "--max-update", "3", "--clip-norm-type", "sparse")
    for r in found:
        expected = (r["gnorm_dense"] ** 2 + r["gnorm_expert"] ** 2 / 4) ** 0.5
        assert r["gnorm"] == pytest.approx(expected, rel=1e-5)
        assert r["gnorm_expert"] > 0


def test_every_pass_in_training_finds_the_rows_of_xmoes_gate_at_their_norm(train, monkeypatch):
    norms, forward = [], XMoEGate.forward

    def watched(self, x_SD):
        if self.training:
            norms.append(self.expert_rows.detach().norm(dim=-1))
        return forward(self, x_SD)

    monkeypatch.setattr(XMoEGate, "forward", watched)
    words = [*EXPERTS, "--update-freq", "2", "--lr", "0.01", *CONSTANT]
    train(*words, "--max-update", "3")
    train(*words, "--max-update", "5")
    assert len(norms) >= 5 * 2
    for norm in norms:
        assert_close(norm.tolist(), [1.5] * 4)


def test_every_shard_is_accounted_for_once_it_is_read(train, tmp_path, records):
    train("--max-epoch", "2", *CONSTANT)
    events = records(tmp_path / "run", "event", event="data", subset="train")
    assert [event["shards_read"] for event in events] == [1, 2]
    assert [event["shards"] for event in events] == [2, 2]
    assert [event["lines"] for event in events] == [14, 27]
    assert events[0]["num_updates"] == 0 < events[1]["num_updates"]
    # Mode none: an epoch is every token once.
    epoch = [r for r in records(tmp_path / "run", "train") if r["epoch"] == 1]
    assert epoch[-1]["tokens_seen"] == events[1]["tokens"]


def test_the_logged_rate_is_the_one_that_was_applied(train):
    _, found, _ = train("--max-update", "4", *CONSTANT, "--warmup-updates", "4", "--lr", "0.4")
    assert_close([r["lr"] for r in found], [0.0, 0.1, 0.2, 0.3])


@pytest.fixture
def exploding(tmp_path):
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "exploding.py").write_text(EXPLODING)
    return ["--user-dir", str(folder), "--criterion", "exploding"]


def test_a_loss_that_is_not_finite_stops_the_run_and_names_its_place(
    start, corpus, tiny, exploding, records, tmp_path
):
    words = [*tiny, *exploding, "--explode-at", "3,4", "--max-update", "6", "--save-dir", "run"]
    command = start("train", corpus, *words)
    assert command.wait() == 1
    assert "update 3 on rank 0" in command.error
    assert "the weights are those of update 2" in command.error
    assert command.error.endswith("out, or begin again with a lower --lr")
    assert "Traceback" not in command.stderr
    # Nothing is lost: the same command stands before the same update again.
    calm = [word if word != "3,4" else "999" for word in words]
    again = start("train", corpus, *calm)
    assert again.wait() == 0, again.stderr
    straight = start("train", corpus, *calm[:-1], "straight")
    assert straight.wait() == 0, straight.stderr
    found = [series(records(tmp_path / name, "train")) for name in ("run", "straight")]
    assert found[0] == found[1]


def test_a_loss_that_is_not_finite_can_be_skipped(run, corpus, tiny, exploding, records, tmp_path):
    words = [*tiny, *exploding, "--explode-at", "3,4", "--max-update", "6", "--save-dir", "run"]
    command = run("train", corpus, *words, "--nonfinite", "skip")
    assert command.code == 0, command.stderr
    assert [r["num_updates"] for r in records(tmp_path / "run", "train")] == [1, 2, 3, 4, 5, 6]
    assert len(records(tmp_path / "run", "event", event="skipped")) == 1


def test_endless_skipping_ends(run, corpus, tiny, exploding):
    everything = ",".join(map(str, range(1, 99)))
    command = run(
        "train", corpus, *tiny, *exploding, "--explode-at", everything, "--max-update", "6",
        "--save-dir", "run", "--nonfinite", "skip", "--nonfinite-limit", "3",
    )  # fmt: skip
    assert command.code == 1
    assert "these were 3 updates in a row" in command.error


def test_bf16_computes_in_bfloat16_and_fp16_says_that_it_does_so_on_a_cpu(train, caplog):
    _, full, _ = train("--max-update", "3", save_dir="full")
    _, half, _ = train("--max-update", "3", "--bf16", save_dir="half")
    with caplog.at_level("INFO"):
        _, other, _ = train("--max-update", "3", "--fp16", save_dir="other")
    assert series(half) == series(other) != series(full)
    assert_close(series(half), series(full), 0.05)
    assert "bfloat16, without loss scaling" in caplog.text


def test_averaged_weights_can_be_validated(train, run, tmp_path):
    train("--max-update", "8", "--store-ema", "--ema-decay", "0.9")
    scores = {}
    for name, words in (("plain", []), ("ema", ["--use-ema"])):
        command = run("validate", "--path", "run", "--cpu", "--json", f"{name}.json", *words)
        assert command.code == 0, command.stderr
        scores[name] = json.loads((tmp_path / f"{name}.json").read_text())["valid/first"]["loss"]
    assert scores["ema"] != scores["plain"]
    # The average lags behind a loss that falls.
    assert scores["ema"] > scores["plain"]
