"""Under torchrun a run whose ranks are killed resumes by itself, and ends with the same bits."""

import os
import random
import signal
import subprocess
import time

import pytest

from cpu_tests.processes import TORCHRUN, children, digest, has_trained, lost_updates, series

KILLS = int(os.environ.get("SCALERUN_TEST_KILLS", "3"))
"""How often the job is hit; on a busy machine each time takes a quarter of a minute."""
INTERVAL, LAST = 5, 12 * (KILLS + 1)
WORDS = [
    "--max-update", str(LAST), "--save-interval-updates", str(INTERVAL), "--no-epoch-checkpoints",
    "--no-save-async", "--validate-interval-updates", "7", "--lr-scheduler", "inverse_sqrt",
    "--keep-last-updates", "2",
]  # fmt: skip


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def test_an_error_of_all_ranks_is_said_once(tmp_path):
    command = [*TORCHRUN, "--standalone", "-m", "scalerun.cli.train", "data", "--no-such-flag"]
    job = subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=tmp_path, check=False
    )
    assert job.returncode == 1
    said = [line for line in job.stderr.splitlines() if "error: " in line]
    assert len(said) == 1, job.stderr
    assert said[0].startswith("error: --")


@pytest.mark.long
@pytest.mark.timeout(120 + 30 * KILLS)
def test_killed_workers_cost_at_most_one_save_interval(run, corpus, tiny, tmp_path):
    whole = run(
        "train", corpus, *tiny, *WORDS, "--distributed-world-size", "2", "--save-dir", "whole"
    )
    assert whole.code == 0, whole.stderr
    save_dir = tmp_path / "killed"
    command = [
        *TORCHRUN, "--standalone", "--max-restarts", str(KILLS), "-m", "scalerun.cli.train",
        str(corpus), *tiny, *WORDS, "--save-dir", str(save_dir),
    ]  # fmt: skip
    draw, victims = random.Random(KILLS), set()
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, env=environment(), cwd=tmp_path)
    try:
        for kill in range(KILLS):
            # Each attempt gets a little further than the last one.
            while job.poll() is None and not has_trained(save_dir, 12 * kill + draw.randint(1, 9)):
                time.sleep(0.005)
            time.sleep(draw.uniform(0, 0.1))
            workers = set(children(job.pid)) - victims
            assert len(workers) == 2, (tmp_path / "log").read_text()
            victim = draw.choice(sorted(workers))
            victims |= workers
            os.kill(victim, signal.SIGKILL)
            while job.poll() is None and workers & set(children(job.pid)):
                time.sleep(0.005)
        assert job.wait(120) == 0, (tmp_path / "log").read_text()
    finally:
        job.terminate()
        job.wait(60)
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log, log
    lost = lost_updates(save_dir)
    assert len(lost) >= KILLS - 1, log  # a kill before the first checkpoint begins anew
    assert max(lost) <= INTERVAL
    assert series(save_dir) == series(tmp_path / "whole")
    assert digest(save_dir / f"checkpoint_{LAST}") == digest(tmp_path / f"whole/checkpoint_{LAST}")
    kept = sorted(path.name for path in save_dir.iterdir() if "checkpoint_" in path.name)
    assert kept == sorted(p.name for p in (tmp_path / "whole").iterdir() if "checkpoint_" in p.name)
