"""TorchScale's documented commands for translation, as the page has them, made small."""

import re
import shlex
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/translation.md"
SMALL = """
    --encoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 32 --decoder-layers 2
    --encoder-attention-heads 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 32
    --decoder-attention-heads 2 --max-tokens 128 --lr 0.01 --warmup-updates 4 --dropout 0.1
    --log-interval 1 --max-update 24 --cpu
"""


def commands(name, word):
    """The page's commands of one module that have a word, without the module."""
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(rf"^python -m scalerun\.cli\.{name} (.*)$", text, re.M)
    return [shlex.split(line) for line in lines if word in line]


DENSE, MOE = commands("train", "--arch mt_base")
ONE_LONG = [DENSE, pytest.param(MOE, marks=pytest.mark.long)]
MAKE = commands("preprocess", "--destdir data-bin/words")[0]


@pytest.fixture
def made(run, parallel_corpus, tmp_path):
    """The folder that the page's first command makes."""
    parallel_corpus.rename(tmp_path / "my_pairs")
    for language in ("en", "es"):
        text = (tmp_path / f"my_pairs/valid.{language}").read_text()
        (tmp_path / f"my_pairs/test.{language}").write_text(text)
    command = run("preprocess", *MAKE)
    assert command.code == 0, command.stderr


def train(run, words, *more):
    command = run("train", *words, *shlex.split(SMALL), *more)
    assert command.code == 0, command.stderr
    return command


def falls(found):
    losses = [record["loss"] for record in found]
    assert len(losses) == 24
    return sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_the_page_gives_torchscales_flags():
    for command in (DENSE, MOE):
        assert {"--share-decoder-input-output-embed", "inverse_sqrt", "--fp16"} <= set(command)
        assert "--task" not in command
    start, end = MOE.index("--moe-expert-count"), MOE.index("--max-tokens")
    assert {"--use-xmoe", "--moe-gating-use-fp32", "moe_cross_entropy"} <= set(MOE[start:end])
    assert (MOE[:start] + MOE[end:])[:-1] == DENSE[:-1]


@pytest.mark.parametrize("words", ONE_LONG, ids=["dense", "moe"])
def test_the_documented_command_trains_in_one_process(run, made, records, tmp_path, words):
    command = train(run, words)
    assert "--fp16" in command.stderr  # it says what a CPU does instead
    folder = tmp_path / words[-1]
    assert falls(records(folder, "train"))
    if words is MOE:
        names = {"moe_gate_loss", "entropy_gating", "overflow_expert1", "unused_expert1_count"}
        assert names <= records(folder, "train")[-1].keys()
    done = run("generate", "--path", folder, "--cpu", "--beam", "2", "--output", "out.txt")
    assert done.code == 0, done.stderr
    assert len((tmp_path / "out.txt").read_text().splitlines()) == 6
    assert "BLEU = " in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("words", [DENSE, MOE], ids=["dense", "moe"])
def test_the_documented_command_trains_in_two_processes(run, made, records, tmp_path, words):
    train(run, words, "--distributed-world-size", "2")
    assert falls(records(tmp_path / words[-1], "train"))


@pytest.mark.long
def test_the_mean_of_a_runs_last_checkpoints_translates(run, made, tmp_path):
    every = ["--save-interval-updates", "6", "--no-epoch-checkpoints", "--save-dir", "run"]
    train(run, DENSE, *every)
    done = run("checkpoint", "average", "run", "--last", "3", "--output", "mean")
    assert done.code == 0, done.stderr
    done = run("generate", "--path", "mean", "--cpu", "--output", "out.txt")
    assert done.code == 0, done.stderr
    assert len((tmp_path / "out.txt").read_text().splitlines()) == 6
