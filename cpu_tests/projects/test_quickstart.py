"""``make quickstart`` keeps its promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BZIP2 = {"valid/plays": 2.72, "valid/novels": 2.41}
"""Bits per byte of ``bzip2 -9``."""


def dry_run(*words):
    """What ``make`` would do."""
    command = ["make", "--dry-run", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("words", [[], ["LONG=1"]])
def test_the_quick_start_does_what_the_readme_promises_in_this_order(words):
    steps = ("train_tokenizer", "cli.train ", "cli.validate", "compare.py", "interactive_cli")
    made = dry_run("quickstart", "--always-make", *words)
    places = [made.index(step) for step in steps]
    assert places == sorted(places)


def test_a_second_quick_start_neither_installs_nor_trains_the_tokenizer_again(tmp_path):
    for name in ("bin/python", "installed", "tokenizer.model"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    again = dry_run("quickstart", f"VENV={tmp_path}", f"TOKENIZER={tmp_path / 'tokenizer.model'}")
    assert "cli.train " in again
    assert "train_tokenizer" not in again
    assert "pip" not in again


def test_another_python_than_that_of_the_environment_is_refused(tmp_path):
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 3.9\n")
    python.chmod(0o755)
    command = ["make", "--dry-run", "quickstart", f"VENV={tmp_path}", f"PYTHON={sys.executable}"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode != 0
    assert f"{tmp_path} has Python 3.9, and {sys.executable} is another" in refused.stderr


def test_the_table_shows_the_model_beside_the_baselines_and_says_which_way_is_up(tmp_path):
    scores = {"plays": 2.6, "novels": 1.9, "speeches": 2.5}
    results = {f"valid/{name}": {"bits_per_byte": value} for name, value in scores.items()}
    (tmp_path / "valid.json").write_text(json.dumps(results))
    quickstart = ROOT / "projects/quickstart"
    command = [sys.executable, quickstart / "compare.py", quickstart / "data", "valid.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert "lower is better" in done.stdout
    assert [line.split() for line in lines if line.startswith(">")] == [
        [">", "this", "model", "2.60", "1.90", "2.50"]
    ]
    [bzip2] = [line.split()[-3:] for line in lines if "bzip2 -9  " in line]
    assert [float(cell) for cell in bzip2[:2]] == pytest.approx(list(BZIP2.values()), abs=0.011)
    assert any(line.split()[:2] == ["order", "5"] for line in lines)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_quick_start_beats_bzip2_and_says_that_it_is_finished(tmp_path):
    """With room in time for a busy machine; the user's own run stays as it is."""
    command = ["make", "quickstart", f"RUN={tmp_path / 'run'}", "FLAGS=--stop-time-hours 0.3"]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    found = json.loads((tmp_path / "run/valid.json").read_text())
    for subset, limit in BZIP2.items():
        assert found[subset]["bits_per_byte"] < limit
    for row in ("this model", "bzip2 -9", "order 5"):
        assert row in first.stdout
    saved = {path.name for path in (tmp_path / "run").glob("checkpoint_*")}
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "1600 updates are done" in again.stderr
    assert {path.name for path in (tmp_path / "run").glob("checkpoint_*")} == saved
