"""A run that is killed or stopped at any instant continues as if nothing had happened."""

import os
import random
import re
import signal
import time

import pytest

LIMITS = ["--max-update", "40", "--save-interval-updates", "6", "--validate-interval-updates", "5"]


def series(records, save_dir):
    """{update: (loss, gnorm, lr, tokens_seen)}; every repetition of an update has to agree."""
    found = {}
    for r in records(save_dir, "train"):
        values = (r["loss"], r["gnorm"], r["lr"], r["tokens_seen"])
        assert found.setdefault(r["num_updates"], values) == values
    return found


def valid_series(records, save_dir):
    found = {}
    for r in records(save_dir, "valid"):
        assert found.setdefault((r["num_updates"], r["subset"]), r["loss"]) == r["loss"]
    return found


@pytest.fixture(scope="module")
def straight(undisturbed, records):
    """The run that nobody disturbs: its training and validation series."""
    save_dir = undisturbed("straight", LIMITS)
    assert len(series(records, save_dir)) == 40
    return series(records, save_dir), valid_series(records, save_dir)


@pytest.mark.parametrize("workers", ["0", "1", "2"])
def test_kill_9_at_random_instants_changes_no_bit(
    start, corpus, tiny, records, tmp_path, straight, workers
):
    words = [*tiny, *LIMITS, "--num-workers", workers, "--save-dir", "killed"]
    save_dir = tmp_path / "killed"
    metrics = save_dir / "metrics.jsonl"
    draw = random.Random(int(workers))
    kills = 0
    for _ in range(12):
        before = metrics.stat().st_size if metrics.exists() else 0
        command = start("train", corpus, *words)
        while command.poll() is None and draw.random() < 0.999:
            if metrics.exists() and metrics.stat().st_size > before:
                break
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.3))
        if command.poll() is not None:
            break
        kills += command.kill() == -signal.SIGKILL
    command = start("train", corpus, *words)
    assert command.wait() == 0, command.stderr
    assert kills >= 2
    assert series(records, save_dir) == straight[0]
    assert valid_series(records, save_dir) == straight[1]


@pytest.mark.parametrize("moment", ["a save", "a validation", "the end of an epoch"])
def test_kill_9_at_a_chosen_moment_changes_no_bit(
    start, corpus, tiny, records, tmp_path, straight, moment
):
    words = [*tiny, *LIMITS, "--save-dir", "killed"]
    save_dir = tmp_path / "killed"
    metrics = save_dir / "metrics.jsonl"

    def reached():
        if moment == "a save":
            return any(save_dir.glob(".*checkpoint_12*")) or any(
                save_dir.glob("*checkpoint_12*tmp*")
            )
        text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
        if moment == "a validation":
            return '"subset": "valid/first", "num_updates": 10' in text or (
                re.search(r'"kind": "valid", "num_updates": 10\b', text) is not None
            )
        return '"epoch": 2' in text

    command = start("train", corpus, *words)
    while command.poll() is None and not reached():
        time.sleep(0.0005)
    if command.poll() is None:
        command.kill()
    command = start("train", corpus, *words)
    assert command.wait() == 0, command.stderr
    assert series(records, save_dir) == straight[0]
    assert valid_series(records, save_dir) == straight[1]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_next_start_goes_on(
    start, corpus, tiny, records, tmp_path, straight, signum, code
):
    words = [
        *tiny,
        "--max-update",
        "40",
        "--validate-interval-updates",
        "5",
        "--save-dir",
        "stopped",
    ]
    save_dir = tmp_path / "stopped"
    for update in (3, 17):
        command = start("train", corpus, *words)
        while command.poll() is None:
            done = records(save_dir, "train") if (save_dir / "metrics.jsonl").exists() else []
            if done and done[-1]["num_updates"] >= update:
                command.send(signum)
                break
            time.sleep(0.001)
        assert command.wait() == code, command.stderr
        pointer = (save_dir / "checkpoint_last").read_text().strip()
        assert (save_dir / pointer).is_dir()
        assert records(save_dir, "event", event="stopped")
    command = start("train", corpus, *words)
    assert command.wait() == 0, command.stderr
    assert series(records, save_dir) == straight[0]
    assert valid_series(records, save_dir).items() >= straight[1].items()


def test_nothing_outlives_a_killed_run(start, corpus, tiny, records, tmp_path):
    words = [*tiny, "--max-update", "99999", "--num-workers", "2", "--save-dir", "run"]
    command = start("train", corpus, *words)
    metrics = tmp_path / "run/metrics.jsonl"
    while not (metrics.exists() and '"kind": "train"' in metrics.read_text()):
        assert command.poll() is None, command.stderr
        time.sleep(0.01)
    group = command.pid
    command.kill()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    pytest.fail("processes of the killed run are still there")


def test_a_finished_run_says_so_and_stays_as_it_is(run, corpus, tiny, records, tmp_path):
    words = [*tiny, "--max-update", "5", "--save-dir", "run"]
    assert run("train", corpus, *words).code == 0
    before = sorted(p.name for p in (tmp_path / "run").iterdir())
    again = run("train", corpus, *words)
    assert again.code == 0
    assert "5 updates are done" in again.stderr
    assert len(records(tmp_path / "run", "train")) == 5
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == before


def test_two_runs_cannot_share_a_folder(start, run, corpus, tiny):
    first = start("train", corpus, *tiny, "--max-update", "100000", "--save-dir", "run")
    while "training" not in first.stderr and "update 1 " not in first.stderr:
        assert first.poll() is None, first.stderr
        time.sleep(0.01)
    second = run("train", corpus, *tiny, "--max-update", "5", "--save-dir", "run")
    first.kill()
    assert second.code == 1
    assert "in use by another run" in second.error
