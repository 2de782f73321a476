"""The manifests: by Kubernetes' own schemas, by what they promise each other, and by a run."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from torch.distributed.run import get_args_parser

from cpu_tests.processes import has_trained, wait_for
from scalerun.dataclass.parser import parse_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cluster/kubernetes"
OLDEST = "1.31"
"""In which podFailurePolicy is no preview any more."""


def manifests(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def kind(name, wanted):
    (found,) = [each for each in manifests(name) if each["kind"] == wanted]
    return found


def container(manifest):
    (found,) = manifest["spec"]["template"]["spec"]["containers"]
    return found


JOB = kind("train.yaml", "Job")
DEPLOYMENT = kind("serve.yaml", "Deployment")
POD = JOB["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_a_manifest_fits_the_schema(path, version):
    for manifest in manifests(path.name):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_misspelt_field_does_not_fit_the_schema():
    spec = {**JOB["spec"], "backofLimit": 3}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**JOB, "spec": spec}, OLDEST, strict=True)


def torchrun_options():
    command = container(JOB)["command"]
    assert command == ["tini", "--", "torchrun"]
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container(JOB)["args"]]
    return get_args_parser().parse_args(words)


def test_there_is_a_pod_for_each_host_of_torchrun():
    spec, options = JOB["spec"], torchrun_options()
    assert spec["completionMode"] == "Indexed"
    assert int(options.nnodes) == spec["completions"] == spec["parallelism"]
    gpus = container(JOB)["resources"]["limits"]["nvidia.com/gpu"]
    assert int(options.nproc_per_node) == gpus
    assert options.training_script == "scalerun.cli.train"


def test_the_ranks_meet_at_the_first_pod():
    name, options = JOB["metadata"]["name"], torchrun_options()
    service = kind("train.yaml", "Service")
    assert options.master_addr == f"{name}-0.{POD['subdomain']}"
    assert service["metadata"]["name"] == POD["subdomain"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert [port["port"] for port in service["spec"]["ports"]] == [options.master_port]


def test_torchrun_waits_for_the_last_save_and_kubernetes_for_torchrun():
    env = {each["name"]: each["value"] for each in container(JOB)["env"]}
    grace = POD["terminationGracePeriodSeconds"]
    assert 300 < int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace


@pytest.mark.parametrize("manifest", [JOB, DEPLOYMENT], ids=["train", "serve"])
def test_what_is_mounted_exists(manifest):
    pod = manifest["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {each["name"]: each["mountPath"] for each in container(manifest)["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    assert mounts["workspace"] == "/workspace"
    (claim,) = manifests("volume.yaml")
    assert volumes["workspace"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_the_service_leads_to_the_server():
    (port,) = kind("serve.yaml", "Service")["spec"]["ports"]
    (listening,) = container(DEPLOYMENT)["ports"]
    assert port["targetPort"] == listening["name"]
    selector = kind("serve.yaml", "Service")["spec"]["selector"]
    assert selector == DEPLOYMENT["spec"]["template"]["metadata"]["labels"]


def test_the_server_understands_its_flags():
    hosted = pytest.importorskip("scalerun.cli.interactive_hosted")
    command, *words = container(DEPLOYMENT)["args"]
    cfg = parse_config(hosted.HostedConfig, words, prog="scalerun-serve")
    (listening,) = container(DEPLOYMENT)["ports"]
    assert command == "serve"
    assert (cfg.host, cfg.port) == ("0.0.0.0", listening["containerPort"])


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_pod(index, port, words, cwd):
    """What the Job's container starts, with one CPU process in place of 8 GPUs."""
    given = {
        "--nproc-per-node=8": "--nproc-per-node=1",
        "--node-rank=$(JOB_COMPLETION_INDEX)": f"--node-rank={index}",
        "--master-addr=scalerun-train-0.scalerun-train": "--master-addr=127.0.0.1",
        "--master-port=29500": f"--master-port={port}",
    }
    args = container(JOB)["args"]
    assert given.keys() <= set(args)
    assert args[-1] == "--config=run.yaml"
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += [*(given.get(word, word) for word in args[:-1]), *words]
    env = {each["name"]: each["value"] for each in container(JOB)["env"]}
    env |= {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with (cwd / f"pod_{index}").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=cwd)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_pod_that_is_moved_away_loses_no_update(corpus, tiny, tmp_path, records):
    words = [str(corpus), *tiny, "--save-dir", "run", "--num-workers", "1"]
    words += ["--lr-scheduler", "constant", "--max-update"]
    for last in (100_000, None):
        if last is None:
            last = records(tmp_path / "run", "event", event="stopped")[0]["num_updates"] + 2
        port = free_port()
        pods = [start_pod(index, port, [*words, str(last)], tmp_path) for index in range(2)]
        try:
            if last == 100_000:
                wait_for(lambda: has_trained(tmp_path / "run"), "training")
                pods[1].send_signal(signal.SIGTERM)
            codes = [pod.wait(90) for pod in pods]
        finally:
            for pod in pods:
                pod.kill()
        log = (tmp_path / "pod_0").read_text() + (tmp_path / "pod_1").read_text()
        assert all(codes) if last == 100_000 else codes == [0, 0], log
    seen = [r["num_updates"] for r in records(tmp_path / "run", "train")]
    assert seen == list(range(1, last + 1)), log
