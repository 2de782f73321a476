"""Several processes started by the command itself."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from cpu_tests.processes import children, has_trained, wait_for

TWO = ("--distributed-world-size", "2")
ENDLESS = ("--max-update", "100000", "--save-dir", "run", "--no-epoch-checkpoints")


def test_two_ranks_train_as_one_process_does(run, corpus, tiny, tmp_path, records):
    for name, words in (("one", ["--update-freq", "2"]), ("two", TWO)):
        command = run("train", corpus, *tiny, *words, "--max-update", "3", "--save-dir", name)
        assert command.code == 0, command.stderr
    one, two = (records(tmp_path / name, "train") for name in ("one", "two"))
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-5)
    assert [r["gnorm"] for r in two] == pytest.approx([r["gnorm"] for r in one], rel=1e-4)
    for kind in ("train", "valid"):
        assert len(records(tmp_path / "two", kind)) == len(records(tmp_path / "one", kind))
    manifest = json.loads((tmp_path / "two/checkpoint_3/manifest.json").read_text())
    assert manifest["world_size"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model-parallel-size", "3"), "error: --model-parallel-size 3 does not divide the 2"),
        (("--ddp-backend", "none"), "error: --ddp-backend none leaves"),
        (("--tokenizer", "none.model"), "error: --tokenizer none.model does not exist"),
    ],
)
def test_a_users_error_is_said_once(words, message, run, corpus, tiny):
    command = run("train", corpus, *tiny, *TWO, *words, "--max-update", "2")
    assert command.code in (1, 2)
    assert command.error.startswith(message), command.stderr
    assert "Traceback" not in command.stderr


def test_a_killed_rank_ends_the_run_with_one_sentence(start, corpus, tiny, tmp_path):
    command = start("train", corpus, *tiny, *TWO, *ENDLESS)
    wait_for(lambda: has_trained(tmp_path / "run"), "training")
    os.kill(children(command.pid)[1], signal.SIGKILL)
    assert command.wait() == 1
    assert "was killed by SIGKILL" in command.error, command.stderr


def test_a_signal_stops_all_ranks_and_the_run_goes_on(start, run, corpus, tiny, tmp_path, records):
    command = start("train", corpus, *tiny, *TWO, *ENDLESS)
    wait_for(lambda: has_trained(tmp_path / "run"), "training")
    command.send(signal.SIGTERM)
    assert command.wait() == 143, command.stderr
    (stopped,) = records(tmp_path / "run", "event", event="stopped")
    last = stopped["num_updates"] + 2
    command = run("train", corpus, *tiny, *TWO, *ENDLESS, "--max-update", str(last))
    assert command.code == 0, command.stderr
    seen = [r["num_updates"] for r in records(tmp_path / "run", "train")]
    assert seen == list(range(1, last + 1))


def test_ranks_do_not_outlive_the_command_and_it_goes_on(start, run, corpus, tiny, tmp_path):
    command = start("train", corpus, *tiny, *TWO, *ENDLESS)
    wait_for(lambda: has_trained(tmp_path / "run"), "training")
    ranks = children(command.pid)
    assert len(ranks) == 2
    command.kill()
    again = run("train", corpus, *tiny, *TWO, *ENDLESS, "--max-update", "3")
    assert again.code == 0, again.stderr
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), "end of the ranks")


@pytest.mark.long
def test_a_rank_that_hangs_is_named_with_what_the_others_waited_for(start, corpus, tiny, tmp_path):
    words = [*TWO, *ENDLESS, "--distributed-timeout-seconds", "4"]
    command = start("train", corpus, *tiny, *words)
    wait_for(lambda: has_trained(tmp_path / "run"), "training")
    os.kill(children(command.pid)[1], signal.SIGSTOP)
    assert command.wait() == 1
    assert re.search(
        r"^error: rank 0: lost the other ranks in \w+ \(rank 0 in update \d+, rank 1 in update "
        r"\d+\); look at the ranks that are behind or gone, or raise --distributed-timeout-s",
        command.error,
    ), command.stderr
