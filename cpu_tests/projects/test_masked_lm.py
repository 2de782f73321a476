"""The recipe for a masked language model does what its page says, also when it is stopped early."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "projects/masked_lm"
DATA = ROOT / "projects/quickstart/data"


def script(name, *words):
    command = [sys.executable, FOLDER / name, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.long
def test_a_seventh_of_the_recipe_beats_the_most_frequent_token(start, run, tmp_path):
    script("prepare.py", DATA, tmp_path / "data")
    config = ["--config", FOLDER / "config.yaml", "--max-update", "500", "--disable-validation"]
    training = start("train", tmp_path / "data", *config, "--save-dir", "run")
    assert training.wait(timeout=500) == 0, training.stderr
    sets = ["--valid-subset", "plays,novels,speeches", "--max-valid-steps", "12"]
    done = run("validate", "--path", "run", "--cpu", "--json", "valid.json", *sets)
    assert done.code == 0, done.stderr
    table = script("ngrams.py", tmp_path / "run", tmp_path / "valid.json").splitlines()
    assert table[0].split() == ["accuracy", "unigram", "trigram", "two-sided", "model"]
    assert [line.split()[0] for line in table[1:]] == ["plays", "novels", "speeches"]
    for line in table[1:]:
        unigram, trigram, both, model = map(float, re.findall(r"([\d.]+)%", line))
        assert 1 < unigram < trigram < both < 60
        assert model > unigram + 2, table


def test_the_page_gives_the_commands_of_the_recipe():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for word in ("prepare.py", "config.yaml", "scalerun.cli.validate", "ngrams.py"):
        assert word in page
