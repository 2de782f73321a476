"""Processes that Slurm starts, as far as their environment tells, train together."""

import socket
import sys
import textwrap

import pytest

from cpu_tests.processes import digest, series

SCONTROL = """\
#!{python}
import sys
assert sys.argv[1:3] == ["show", "hostnames"], sys.argv
assert sys.argv[3] == "no-such-host-[1-2]", sys.argv
print("127.0.0.1\\nno-such-host-2")
"""
FLAGS = ("--max-update", "5", "--distributed-timeout-seconds", "20")


@pytest.fixture
def srun(start, tmp_path):
    """Start one process per task, as ``srun --ntasks 2`` would on two nodes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def srun(*argv, nodes="127.0.0.1", path="/usr/bin:/bin"):
        commands = []
        for rank in range(2):
            place = {
                "PATH": path,
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NODELIST": nodes,
                "SLURM_JOB_ID": "4711",
            }
            words = [*argv, *FLAGS, "--distributed-port", str(port)]
            commands.append(start("train", *words, env=place))
        for command in commands:
            command.wait(60)
        return commands

    return srun


def test_two_tasks_train_as_two_local_ranks_do(srun, run, corpus, tiny, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(textwrap.dedent(SCONTROL).format(python=sys.executable))
    (tools / "scontrol").chmod(0o755)
    path = f"{tools}:/usr/bin:/bin"
    for command in srun(
        corpus, *tiny, "--save-dir", "slurm", nodes="no-such-host-[1-2]", path=path
    ):
        assert command.code == 0, command.stderr
    local = run("train", corpus, *tiny, *FLAGS, "--save-dir", "two", "--distributed-world-size", 2)
    assert local.code == 0, local.stderr
    assert series(tmp_path / "slurm") == series(tmp_path / "two")
    assert digest(tmp_path / "slurm/checkpoint_5") == digest(tmp_path / "two/checkpoint_5")


def test_without_scontrol_a_list_of_nodes_is_an_error(srun, corpus, tiny, tmp_path):
    for command in srun(corpus, *tiny, nodes="node[1-2]", path=str(tmp_path)):
        assert command.code == 1
        assert command.error.startswith("error: 'scontrol show hostnames node[1-2]' failed")


def test_tasks_that_do_not_meet_say_why(start, corpus, tiny):
    place = {"SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    place |= {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_JOB_ID": "4712"}
    words = [*tiny, "--max-update", "5", "--distributed-timeout-seconds"]
    alone = start("train", corpus, *words, "2", env={**place, "SLURM_PROCID": "0"})
    assert alone.wait(60) == 1
    assert alone.error.startswith(
        "error: rank 0: the other 1 ranks could not be met at 127.0.0.1:24712 within 2 s"
    ), alone.stderr
    assert "(1 of 2 came)" in alone.error
    # Both come, but have no device to speak through.
    place |= {"GLOO_SOCKET_IFNAME": "none0", "SLURM_JOB_ID": "4713"}
    both = [
        start("train", corpus, *words, "9", env={**place, "SLURM_PROCID": str(rank)})
        for rank in range(2)
    ]
    assert [command.wait(60) for command in both] == [1, 1]
    assert any("none0" in command.error for command in both), both[0].stderr
    assert not any("Traceback" in command.stderr for command in [alone, *both])
