"""What a run leaves in its folder, and that it is enough to run it again."""

import json
import shlex

import pytest


def series(records, save_dir):
    return [(r["num_updates"], r["loss"], r["gnorm"]) for r in records(save_dir, "train")]


@pytest.fixture
def trained(run, corpus, tiny, tmp_path):
    command = run("train", corpus, *tiny, "--max-update", "4", "--save-dir", "run")
    assert command.code == 0, command.stderr
    return tmp_path / "run"


def test_the_written_configuration_repeats_the_run(run, trained, records, tmp_path):
    again = run("train", "--config", "run/config.yaml", "--save-dir", "again")
    assert again.code == 0, again.stderr
    assert series(records, tmp_path / "again") == series(records, trained)


def test_the_written_command_repeats_the_run(run, trained, records, tmp_path):
    words = shlex.split((trained / "command.txt").read_text())
    assert words[:3] == ["python", "-m", "scalerun.cli.train"]
    again = run("train", *words[3:], "--save-dir", "again")
    assert again.code == 0, again.stderr
    assert series(records, tmp_path / "again") == series(records, trained)


def test_versions_are_written_before_the_first_update(run, corpus, tiny, tmp_path):
    command = run("train", corpus, *tiny, "--batch-size", "9999", "--max-update", "1")
    assert command.code == 1
    folder = tmp_path / "checkpoints"
    found = json.loads((folder / "versions.json").read_text())
    assert {"scalerun", "torch", "python", "commit"} <= found.keys()
    assert (folder / "config.yaml").exists()
    assert (folder / "command.txt").exists()


def test_pointers_name_folders(trained):
    for pointer in ("checkpoint_last", "checkpoint_best"):
        assert (trained / (trained / pointer).read_text().strip()).is_dir()


@pytest.mark.parametrize("log_format", ["tqdm", "simple", "json", "none", "auto"])
def test_every_log_format_trains(run, corpus, tiny, log_format):
    command = run(
        "train", corpus, *tiny, "--max-update", "2", "--save-dir", "run", "--log-format", log_format
    )
    assert command.code == 0, command.stderr
    if log_format == "json":
        kinds = [json.loads(line)["kind"] for line in command.stdout.splitlines()]
        assert kinds.count("train") == 2
    else:
        assert command.stdout == ""


def test_trackers_can_be_used_together(run, corpus, tiny, tmp_path):
    command = run(
        "train", corpus, *tiny, "--max-update", "3", "--save-dir", "run", "--tensorboard-logdir",
        "board", "--log-file", "text.log",
    )  # fmt: skip
    assert command.code == 0, command.stderr
    assert list((tmp_path / "board").rglob("events.*"))
    assert "update 3" in (tmp_path / "text.log").read_text()


def test_a_profile_is_written(run, corpus, tiny, tmp_path):
    command = run(
        "train", corpus, *tiny, "--max-update", "4", "--save-dir", "run", "--profile",
        "--profile-updates", "2,3",
    )  # fmt: skip
    assert command.code == 0, command.stderr
    assert list((tmp_path / "run/profile").glob("trace_2-3.json"))


def test_weights_can_start_another_run(run, trained, corpus, tiny, records, tmp_path):
    words = ["--restore-file", "run", "--reset-optimizer", "--reset-lr-scheduler"]
    words += ["--reset-dataloader", "--reset-meters", "--max-update", "2", "--save-dir", "second"]
    command = run("train", corpus, *tiny, *words)
    assert command.code == 0, command.stderr
    first, second = series(records, trained), series(records, tmp_path / "second")
    assert [update for update, *_ in second] == [1, 2]
    assert second[0][1] < first[0][1]
    again = run("train", corpus, *tiny, *words[:-3], "3", *words[-2:])
    assert again.code == 0, again.stderr
    assert [update for update, *_ in series(records, tmp_path / "second")] == [1, 2, 3]


def test_checkpoints_are_kept_as_told(run, corpus, tiny, tmp_path):
    command = run(
        "train", corpus, *tiny, "--max-update", "9", "--save-dir", "run", "--disable-validation",
        "--save-interval-updates", "2", "--keep-last-updates", "2", "--no-epoch-checkpoints",
    )  # fmt: skip
    assert command.code == 0, command.stderr
    kept = sorted(p.name for p in (tmp_path / "run").glob("checkpoint_*") if p.is_dir())
    assert kept == ["checkpoint_8", "checkpoint_9"]
