"""What tests of several processes share: to watch them, and to compare what they leave behind."""

import hashlib
import sys
import time
from pathlib import Path

from cpu_tests.conftest import records
from scalerun.checkpoint.storage import StoredTensors

TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
    "--monitor-interval", "0.1",
]  # fmt: skip


def children(pid):
    """Processes that a process has started, the oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return sorted(found)


def wait_for(condition, what, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what}"
        time.sleep(0.05)


def has_trained(save_dir, updates=2):
    path = save_dir / "metrics.jsonl"
    return path.exists() and path.read_text().count("gnorm") >= updates


def digest(checkpoint):
    """One hash of all tensors of a checkpoint, whole: weights and optimizer state."""
    stored, content = StoredTensors(checkpoint), hashlib.sha256()
    names = [f"{part}.{name}" for part in stored.parts() for name in stored.templates(part)]
    assert names
    for name in sorted(names):
        content.update(name.encode() + stored.read(name).numpy().tobytes())
    return content.hexdigest()


def series(save_dir):
    """{update: numbers} of training and validation; every repetition of an update has to agree."""
    found = {}
    for r in records(save_dir, "train"):
        values = (r["loss"], r["gnorm"], r["lr"], r["tokens_seen"])
        assert found.setdefault(r["num_updates"], values) == values
    for r in records(save_dir, "valid"):
        assert found.setdefault((r["num_updates"], r["subset"]), r["loss"]) == r["loss"]
    return found


def lost_updates(save_dir):
    """Updates that each restart of a run had to do again.

    A restart that goes on from anything but the newest checkpoint that was reported fails here.
    """
    lost, done, saved = [], 0, 0
    for r in records(save_dir, None):
        if r["kind"] == "train":
            done = r["num_updates"]
        elif r.get("event") == "saved":
            saved = r["num_updates"]
        elif r.get("event") == "resumed":
            assert r["num_updates"] >= saved
            lost.append(done - r["num_updates"])
            done = r["num_updates"]
    return lost
