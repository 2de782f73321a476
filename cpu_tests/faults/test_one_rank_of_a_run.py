"""A run of two ranks of which one has a full disk, a NaN, or takes its time."""

import re
from pathlib import Path

import pytest

from cpu_tests.processes import digest, series

SAMPLE = 21
"""A sequence of the third update."""
PLUGIN = Path(__file__).with_name("plugin")
OWN = [
    "--distributed-world-size", "2", "--user-dir", str(PLUGIN), "--criterion", "faulty",
    "--fault-sample", str(SAMPLE), "--max-update", "6", "--save-interval-updates", "2",
    "--no-epoch-checkpoints",
]  # fmt: skip


@pytest.fixture
def words(tiny):
    return [*tiny, *OWN, "--save-dir", "run"]


@pytest.fixture(scope="module")
def straight(undisturbed):
    """The folder of the run without a fault."""
    return undisturbed("straight", OWN)


def kept(save_dir):
    return sorted(path.name for path in save_dir.glob("*checkpoint_*") if path.is_dir())


@pytest.mark.parametrize("how", ["--save-async", "--no-save-async"])
def test_a_disk_that_is_full_on_one_rank_ends_all(
    how, run, corpus, words, tmp_path, straight, records
):
    words = [*words, how]
    command = run("train", corpus, *words, "--fault", "disk")
    assert command.code == 1
    # A thread may still be writing the second update's when the third one fills the disk.
    found = re.match(
        r"error: checkpoint_([24]) could not be written to --save-dir run: File too large; the "
        r"checkpoints there are intact",
        command.error,
    )
    assert found, command.stderr
    assert "Traceback" not in command.stderr
    assert kept(tmp_path / "run") == ["checkpoint_2"] * (found[1] == "4")
    assert run("train", corpus, *words).code == 0
    assert digest(tmp_path / "run/checkpoint_6") == digest(straight / "checkpoint_6")


def test_a_slow_rank_only_delays(run, corpus, words, tmp_path, straight):
    command = run("train", corpus, *words, "--fault", "slow")
    assert command.code == 0, command.stderr
    assert series(tmp_path / "run") == series(straight)
    assert digest(tmp_path / "run/checkpoint_6") == digest(straight / "checkpoint_6")


def test_a_nan_on_one_rank_stops_all_and_leaves_the_weights(
    run, corpus, words, tmp_path, straight, records
):
    command = run("train", corpus, *words, "--fault", "nan", "--save-interval-updates", "1")
    assert command.code == 1
    assert "Traceback" not in command.stderr
    assert command.error.startswith("error: update 3 on rank 1 is not finite: the output of ")
    assert "1.ffn" in command.error
    assert "FSDP" not in command.error
    assert "the weights are those of update 2" in command.error
    assert kept(tmp_path / "run") == ["checkpoint_1", "checkpoint_2"]
    assert digest(tmp_path / "run/checkpoint_2") == digest(straight / "checkpoint_2")
    go_on = run("train", corpus, *words, "--fault", "nan", "--nonfinite", "skip")
    assert go_on.code == 0, go_on.stderr
    (skipped,) = records(tmp_path / "run", "event", event="skipped")
    assert "on rank 1" in skipped["reason"]
    assert [r["num_updates"] for r in records(tmp_path / "run", "train")] == list(range(1, 7))
