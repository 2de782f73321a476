"""Commands that generate on several ranks which share the model's products."""

import json

import pytest

from scalerun.cli.generate import GenerateConfig
from scalerun.dataclass.errors import ConfigError


@pytest.fixture(scope="module")
def trained(undisturbed):
    return undisturbed("shared", ["--max-update", "2"])


@pytest.fixture
def answers(launch, trained, tmp_path):
    def answers(*words, stdin, code=0):
        command = launch(
            tmp_path, "interactive_cli", "--path", str(trained), "--cpu", *words, stdin=stdin
        )
        assert command.wait() == code, command.stderr
        return command

    return answers


@pytest.mark.parametrize(
    "words", [["--beam", "3"], pytest.param(["--seed", "4"], marks=pytest.mark.long)]
)
def test_two_ranks_print_what_one_prints(answers, words):
    words = [*words, "--max-new-tokens", "8", "--json"]
    one, two = (
        answers(*words, *more, stdin="the cat\n\nab\n").stdout
        for more in ([], ["--model-parallel-size", "2"])
    )
    alone, shared = ([json.loads(line) for line in text.splitlines()] for text in (one, two))
    assert len(alone) == 3
    assert [each["tokens"] for each in shared] == [each["tokens"] for each in alone]


@pytest.mark.long
def test_an_error_of_a_prompt_is_said_once_and_ends_all_ranks(answers):
    words = ["--model-parallel-size", "2", "--max-new-tokens", "8"]
    error = answers(*words, stdin=f"{'a' * 5000}\n", code=1).stderr
    assert error.count("error:") == 1
    assert "standard input, line 1" in error
    assert "exceeds the model's context" in error


@pytest.mark.long
def test_ranks_that_cannot_share_the_model_are_refused(answers):
    error = answers("--model-parallel-size", "3", stdin="a\n", code=2).stderr
    assert "cannot be shared equally by --model-parallel-size 3 ranks" in error


def test_a_launcher_s_number_of_processes_has_to_be_that_of_the_flag(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1234")
    cfg = GenerateConfig(path="run", model_parallel_size=2)
    with pytest.raises(ConfigError, match="is 2, but the launcher started 4 processes"):
        cfg.on_every_rank(lambda ranks: 0)


def test_no_rank_is_refused():
    with pytest.raises(ConfigError, match="--model-parallel-size is 0"):
        GenerateConfig(path="run", model_parallel_size=0).validate()
