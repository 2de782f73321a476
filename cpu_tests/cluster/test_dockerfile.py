"""What can be said of the Dockerfile without building it; build_image.py builds it."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cpu_tests.cluster.build_image import bases

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def instructions(name):
    """What follows each use of an instruction, continued lines joined, comments left out."""
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]
    return re.findall(rf"^{name} (.*)$", "\n".join(lines).replace("\\\n", ""), re.M)


def default(argument):
    (value,) = {each.split("=", 1)[1] for each in instructions("ARG") if f"{argument}=" in each}
    return value


def tool(name):
    """A program that the extra ``test`` has brought, or the machine's own."""
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    assert found, f"{name} is missing: install the extra test"
    return found


def lint(path):
    command = [tool("hadolint"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_linter_finds_nothing():
    done = lint(ROOT / "Dockerfile")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_linter_is_awake(tmp_path):
    worse = TEXT.replace(" && rm -rf /var/lib/apt/lists/*\n", "\n").replace("\\\n\n", "\n\n")
    (tmp_path / "Dockerfile").write_text(worse)
    done = lint(tmp_path / "Dockerfile")
    assert done.returncode == 1
    assert "DL3009" in done.stdout


def test_compilers_stay_behind():
    assert bases(TEXT) == {
        f"nvidia/cuda:{default('CUDA')}-{kind}-ubuntu{default('UBUNTU')}"
        for kind in ("devel", "base")
    }
    assert re.fullmatch(r"\d+\.\d+\.\d+", default("CUDA"))
    last = TEXT[TEXT.rindex("\nFROM ") :]
    assert "-base-" in last.splitlines()[1]
    assert "pip install" not in last
    assert 'if [ "${COMPILER}" = 1 ]' in last
    assert default("COMPILER") == default("APEX") == "0"


def test_the_command_runs_as_a_user_with_a_fixed_number():
    *_, user = instructions("USER")
    assert user == "10001:10001"
    assert instructions("USER") == TEXT[TEXT.rindex("\nFROM ") :].split("USER ")[1].split("\n")[:1]
    for path in sorted((ROOT / "cluster/kubernetes").glob("*.yaml")):
        numbers = set(re.findall(r"(?:runAsUser|runAsGroup|fsGroup): (\d+)", path.read_text()))
        assert numbers <= {"10001"}


def test_it_starts_the_commands():
    (entry,) = instructions("ENTRYPOINT")
    assert json.loads(entry) == ["tini", "--", "python", "-m", "scalerun.cli"]
    assert json.loads(instructions("CMD")[0]) == ["--help"]


def test_what_is_copied_is_what_docker_is_shown():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    shown = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        source
        for line in instructions("COPY")
        if "--from" not in line
        for source in line.split()[:-1]
    }
    assert "*" in ignored
    assert copied == shown
    assert all((ROOT / name).exists() for name in copied)


def test_torch_and_extras_are_those_of_the_package():
    (wanted,) = (Requirement(each) for each in PROJECT["dependencies"] if "torch" in each)
    pinned = Requirement(default("TORCH"))
    (version,) = (each.version for each in pinned.specifier)
    assert pinned.name == "torch"
    assert version in wanted.specifier
    assert set(default("EXTRAS").split(",")) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("argument", ["CUDA", "TORCH", "FLASH_ATTN", "APEX_TAG"])
def test_what_is_fetched_has_a_version(argument):
    assert re.search(r"\d+\.\d+", default(argument))
    assert "latest" not in TEXT
