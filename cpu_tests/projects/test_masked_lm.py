"""The recipe for a masked language model does what its page says, when it is made small."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "projects/masked_lm"
DATA = ROOT / "projects/quickstart/data"
SMALL = [
    "--encoder-layers", "1", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "32",
    "--encoder-attention-heads", "2", "--warmup-updates", "1", "--max-update", "3",
]  # fmt: skip


def script(name, *words):
    command = [sys.executable, FOLDER / name, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.long
def test_the_recipe_ends_with_a_table(run, tmp_path):
    script("prepare.py", DATA, tmp_path / "data")
    config = ["--config", FOLDER / "config.yaml"]
    done = run("train", tmp_path / "data", *config, *SMALL, "--save-dir", "run")
    assert done.code == 0, done.stderr
    sets = ["--valid-subset", "plays,novels,speeches", "--max-valid-steps", "3"]
    done = run("validate", "--path", "run", "--cpu", "--json", "valid.json", *sets)
    assert done.code == 0, done.stderr
    table = script("ngrams.py", tmp_path / "run", tmp_path / "valid.json").splitlines()
    assert table[0].split() == ["accuracy", "unigram", "trigram", "two-sided", "model"]
    assert [line.split()[0] for line in table[1:]] == ["plays", "novels", "speeches"]
    for line in table[1:]:
        unigram, trigram, both, _ = map(float, re.findall(r"([\d.]+)%", line))
        assert 1 < unigram < trigram < both < 60


def test_the_page_gives_the_commands_of_the_recipe():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for word in ("prepare.py", "config.yaml", "scalerun.cli.validate", "ngrams.py"):
        assert word in page
