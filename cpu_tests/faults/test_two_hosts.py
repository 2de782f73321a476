"""Two hosts, as two network namespaces of this one, train together under torchrun."""

import contextlib
import os
import subprocess

import pytest

from cpu_tests.conftest import records
from cpu_tests.processes import TORCHRUN

HOSTS = ("scalerun_a", "scalerun_b")
ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Two names of namespaces that reach each other, and nothing else, through ``link0``."""
    with contextlib.ExitStack() as stack:
        try:
            for host in HOSTS:
                ip("netns", "add", host)
                stack.callback(ip, "netns", "del", host)
            first, second = HOSTS
            ip(
                *("link", "add", "link0", "netns", first, "type", "veth"),
                *("peer", "name", "link0", "netns", second),
            )
            for host, address in zip(HOSTS, ADDRESSES, strict=True):
                ip("-n", host, "addr", "add", f"{address}/24", "dev", "link0")
                for device in ("lo", "link0"):
                    ip("-n", host, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or error
            pytest.skip(f"network namespaces cannot be made here: {reason}")
        yield HOSTS


@pytest.mark.long
def test_two_hosts_train_together(hosts, corpus, tiny, tmp_path):
    words = [*tiny, "--max-update", "3", "--save-dir", str(tmp_path / "run")]
    words += ["--distributed-timeout-seconds", "60"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    jobs = []
    for node, host in enumerate(hosts):
        command = [
            "ip", "netns", "exec", host, *TORCHRUN, "--nproc-per-node", "1", "--nnodes", "2",
            "--node-rank", str(node), "--master-addr", ADDRESSES[0], "--master-port", "29511",
            "-m", "scalerun.cli.train", str(corpus), *words,
        ]  # fmt: skip
        with (tmp_path / host).open("w") as log:
            jobs.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=tmp_path)
            )
    try:
        codes = [job.wait(150) for job in jobs]
    finally:
        for job in jobs:
            job.terminate()
            job.wait(60)
    assert codes == [0, 0], [(tmp_path / host).read_text() for host in hosts]
    assert [r["num_updates"] for r in records(tmp_path / "run", "train")] == [1, 2, 3]
    assert "2 ranks" in (tmp_path / hosts[0]).read_text()
