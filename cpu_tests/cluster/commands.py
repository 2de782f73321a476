"""Commands of clusters in the documentation: what they name has to exist."""

import re
from itertools import takewhile
from pathlib import Path

from cpu_tests.cluster.test_dockerfile import instructions
from scalerun.cli.__main__ import commands

ROOT = Path(__file__).parents[2]
IMAGE = "scalerun"
FLAGS = {
    "--build-arg", "--device", "--entrypoint", "--env", "--follow", "--gpus", "--gpus-per-node",
    "--gpus-per-task", "--ipc", "--master-addr", "--master-port", "--network", "--node-rank",
    "--rm", "--signal", "--tag", "--ulimit", "--user", "--volume",
}  # fmt: skip
"""Of docker, kubectl, torchrun and Slurm."""


def check(words):
    """Check a command of ``docker``, ``kubectl`` or ``sbatch``.

    Returns:
        The words of a scalerun command that it would start, as ``train --config run.yaml``, or [].
    """
    environment = list(takewhile(lambda word: re.match(r"[A-Z]+=", word), words))
    program, *rest = words[len(environment) :]
    script = (ROOT / "cluster/slurm/train.sbatch").read_text(encoding="utf-8")
    if program == "sbatch":
        assert (ROOT / rest[0]).is_file(), rest[0]
        assert all("${" + word.split("=")[0] + ":-}" in script for word in environment)
        return ["train", *rest[1:]]
    assert not environment
    if program == "docker":
        return {"build": _build, "run": _run}[rest[0]](rest[1:])
    assert program == "kubectl", f"no rule for {words}"
    files = [rest[i + 1] for i, word in enumerate(rest) if word == "-f"]
    assert all((ROOT / name).is_file() for name in files), files
    manifests = "".join(path.read_text() for path in (ROOT / "cluster/kubernetes").iterdir())
    for name in (word.split("/")[1] for word in rest if re.match(r"\w+/[\w-]+$", word)):
        assert f"\n  name: {name}\n" in manifests
    assert files or rest[0] == "logs", f"no rule for {words}"
    return []


def _build(words):
    given = [words[i + 1].split("=")[0] for i, word in enumerate(words) if word == "--build-arg"]
    assert set(given) <= {each.split("=")[0] for each in instructions("ARG")}
    assert words[-1] == "."
    return []


def _run(words):
    cut = words.index(IMAGE)
    options, (name, *rest) = words[:cut], words[cut + 1 :]
    if "--entrypoint" in options:
        assert options[options.index("--entrypoint") + 1] == "torchrun"
        rest = words[words.index("scalerun.cli.train") + 1 :]
        name = "train"
    if name == "--help":
        return []
    assert name in commands(), name
    return [name, *rest]
