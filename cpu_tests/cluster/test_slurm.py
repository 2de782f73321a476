"""The batch script, under commands that do what Slurm's would."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cpu_tests.cluster.test_dockerfile import tool

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "cluster/slurm/train.sbatch"
OPTIONS = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SCRIPT.read_text(), re.M))
JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "no-such-host-[1-2]",
    "SLURM_CPUS_PER_TASK": "1",
}
SCONTROL = """\
case "$1" in
  show) test "$3" = "no-such-host-[1-2]" && printf '127.0.0.1\\nno-such-host-2\\n' ;;
  requeue) echo "$2" >> requeued ;;
esac
"""
TOLD = """\
printf '%s\\n' "$@" > told
printf '%s\\n' "$MASTER_ADDR" > first_host
exit "$SRUN_CODE"
"""
TASKS = """\
import os, pathlib, signal, subprocess, sys, time

command = sys.argv[sys.argv.index("python"):]
tasks = []
for rank in ("0", "1"):
    place = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": "2"}
    place["SLURM_STEP_NODELIST"] = os.environ["SLURM_JOB_NODELIST"]
    tasks.append(subprocess.Popen(command, env={**os.environ, **place}, start_new_session=True))
if os.environ.get("TIME_LIMIT_NEARS"):
    records = pathlib.Path("run/metrics.jsonl")
    while not records.exists() or records.read_text().count("gnorm") < 2:
        assert all(task.poll() is None for task in tasks)
        time.sleep(0.05)
    for task in tasks:  # every process of a step gets the signal of --signal
        os.killpg(task.pid, signal.SIGTERM)
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def submit(tmp_path):
    """Run the script as ``sbatch`` would, with our own ``scontrol`` and ``srun``."""
    tools = tmp_path / "tools"
    tools.mkdir()

    def submit(srun, *words, **environment):
        for name, text in (("scontrol", f"#!/bin/bash\n{SCONTROL}"), ("srun", srun)):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        path = f"{tools}:{Path(sys.executable).parent}:/usr/bin:/bin"
        env = {**os.environ, **JOB, "PATH": path, **environment}
        return subprocess.run(
            ["bash", str(SCRIPT), *words], cwd=tmp_path, env=env, capture_output=True, text=True,
            check=False,
        )  # fmt: skip

    return submit


def test_the_shell_has_nothing_to_say():
    done = subprocess.run(
        [tool("shellcheck"), str(SCRIPT)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_each_gpu_has_a_task_that_sees_all_gpus_of_its_host():
    assert OPTIONS["ntasks-per-node"] == OPTIONS["gpus-per-node"] == "8"
    assert not {"gpus-per-task", "gpu-bind"} & OPTIONS.keys()


def test_the_signal_comes_to_the_tasks_early_and_only_once():
    assert OPTIONS["signal"] == "TERM@600"  # with a B: it would come to the shell alone
    assert "torchrun" not in SCRIPT.read_text()  # it would hand the signal on once more
    assert {"requeue", "open-mode"} <= OPTIONS.keys()


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (2, False), (143, True)])
def test_only_a_run_that_a_signal_stopped_is_queued_again(code, requeued, submit, tmp_path):
    done = submit(f"#!/bin/bash\n{TOLD}", "--config", "run.yaml", SRUN_CODE=str(code))
    assert done.returncode == code, done.stderr
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "4711\n"


def test_the_tasks_run_in_a_container_when_one_is_named(submit, tmp_path):
    start = "--kill-on-bad-exit=1\n--cpus-per-task=1\n"
    command = "python\n-m\nscalerun.cli\ntrain\n--config\na file.yaml\n"
    submit(f"#!/bin/bash\n{TOLD}", "--config", "a file.yaml", SRUN_CODE="0")
    assert (tmp_path / "told").read_text() == start + command
    assert (tmp_path / "first_host").read_text() == "127.0.0.1\n"
    image = "registry.example.com#scalerun:0.1.0"
    submit(f"#!/bin/bash\n{TOLD}", "--config", "a file.yaml", SRUN_CODE="0", CONTAINER=image)
    options = f"--container-image={image}\n--container-mounts={tmp_path}:/workspace\n"
    options += "--container-workdir=/workspace\n"
    assert (tmp_path / "told").read_text() == start + options + command


@pytest.mark.long
def test_a_run_goes_on_after_its_time_limit(submit, corpus, tiny, tmp_path, records):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    srun = f"#!{sys.executable}\n{TASKS}"
    words = [str(corpus), *tiny, "--save-dir", "run", "--num-workers", "1"]
    words += ["--lr-scheduler", "constant", "--distributed-port", port, "--max-update"]
    done = submit(srun, *words, "100000", TIME_LIMIT_NEARS="1")
    assert done.returncode == 143, done.stderr
    assert (tmp_path / "requeued").read_text() == "4711\n"
    (stopped,) = records(tmp_path / "run", "event", event="stopped")
    last = stopped["num_updates"] + 2
    done = submit(srun, *words, str(last))
    assert done.returncode == 0, done.stderr
    seen = [r["num_updates"] for r in records(tmp_path / "run", "train")]
    assert seen == list(range(1, last + 1))
    assert (tmp_path / "requeued").read_text() == "4711\n"
