"""A rank of a locally started run is killed at any instant: one sentence, and the run goes on."""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from cpu_tests.processes import children, digest, lost_updates, series

PLUGIN = Path(__file__).with_name("plugin")
KILLS = 20
LAST = 3 * KILLS
MOMENTS = ("training", "training", "a save", "a validation")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_20_killed_ranks_change_no_bit(start, run, corpus, tiny, tmp_path):
    words = [
        *tiny, "--distributed-world-size", "2", "--user-dir", PLUGIN, "--criterion", "faulty",
        "--save-interval-updates", "3", "--validate-interval-updates", "4", "--max-update",
        str(LAST), "--keep-last-updates", "3", "--no-epoch-checkpoints",
    ]  # fmt: skip
    straight = run("train", corpus, *words, "--save-dir", "straight")
    assert straight.code == 0, straight.stderr
    draw, killed = random.Random(5), {}
    words += ["--save-dir", "killed", "--fault", "slow_valid"]
    save_dir, validating = tmp_path / "killed", tmp_path / "validating"
    metrics = save_dir / "metrics.jsonl"
    for _ in range(KILLS):
        moment = draw.choice(MOMENTS)
        validating.unlink(missing_ok=True)
        before = metrics.stat().st_size if metrics.exists() else 0

        def reached(moment=moment, before=before):
            match moment:
                case "a save":
                    return any(save_dir.glob(".checkpoint_*.tmp"))
                case "a validation":
                    return validating.exists()
            return metrics.exists() and metrics.stat().st_size > before

        command = start("train", corpus, *words)
        while command.poll() is None and not reached():
            time.sleep(0.002)
        if moment == "training":
            time.sleep(draw.uniform(0, 0.7))
        ranks = children(command.pid)
        if len(ranks) < 2:
            assert command.wait() == 0, command.stderr
            break  # it was at its end
        os.kill(draw.choice(ranks), signal.SIGKILL)
        assert command.wait() == 1
        assert re.fullmatch(r"error: rank [01] was killed by SIGKILL", command.error), (
            command.stderr
        )
        assert "Traceback" not in command.stderr
        killed[moment] = killed.get(moment, 0) + 1
    last = run("train", corpus, *words)
    assert last.code == 0, last.stderr
    assert sum(killed.values()) >= KILLS // 2
    assert set(killed) == set(MOMENTS)
    lost_updates(save_dir)
    assert series(save_dir) == series(tmp_path / "straight")
    assert digest(save_dir / f"checkpoint_{LAST}") == digest(
        tmp_path / f"straight/checkpoint_{LAST}"
    )
    assert not list(save_dir.glob(".checkpoint_*"))
