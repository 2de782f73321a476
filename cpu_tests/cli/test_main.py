"""``python -m scalerun.cli COMMAND``: what a container starts."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scalerun.cli import __main__ as cli

ROOT = Path(__file__).parents[2]


def run(*words):
    command = [sys.executable, "-m", "scalerun.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_commands_are_the_console_scripts():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {f"scalerun-{name}": script.value for name, script in cli.commands().items()} == scripts


def test_a_command_is_the_one_of_its_console_script():
    done = run("train", "--version")
    assert (done.returncode, done.stdout[:15]) == (0, "scalerun-train ")
    done = run("train-tokenizer", "nowhere", "--output", "t.model")
    assert done.returncode == 1
    assert done.stderr.startswith("error: the data folder nowhere ")


def test_help_lists_the_commands():
    done = run("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("train", "validate", "interactive"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: COMMAND is missing; there are chat, checkpoint, "),
        (["train_tokenizer"], "error: 'train_tokenizer' is no command (did you mean train-tok"),
        (["/bin/bash"], "error: '/bin/bash' is no command; there are chat, checkpoint, "),
    ],
)
def test_what_is_no_command_is_refused_in_one_sentence(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["-m", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(message)


def test_where_nothing_is_installed_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["-m", "train"])
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    with pytest.raises(SystemExit):
        cli.main()
    assert "scalerun is not installed in this Python" in capsys.readouterr().err
