"""How commands end: exit codes, and streams that are not there."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


CLOSED = """
import sys
from scalerun.cli.entry import run_cli

def main():
    print("an answer")
    return 3 if sys.stdin.read() == "" else 4

run_cli(main)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_an_empty_one(closed, tmp_path):
    (tmp_path / "command.py").write_text(CLOSED)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} command.py {closed}"], cwd=tmp_path, env=env,
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert done.stderr == ""
    assert done.stdout == ("" if ">&-" in closed.replace("2>&-", "") else "an answer\n")


SLOW_IMPORT = """
import sys, time
print("importing", flush=True)
time.sleep(60)
"""


def test_ctrl_c_during_the_imports_ends_quietly(tmp_path):
    """The command stands in the middle of ``import torch``, as far as it knows."""
    (tmp_path / "torch.py").write_text(SLOW_IMPORT)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, "-m", "scalerun.cli.train"], env=env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (out, err) == ("", "")
    # A shell shows 130 for a process that SIGINT ended.
    assert process.returncode in (130, -signal.SIGINT)
