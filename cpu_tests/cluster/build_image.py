"""Builds the Dockerfile on a Debian root and runs what it makes, where no registry can be reached.

    sudo apt-get install buildah crun debootstrap
    sudo python cpu_tests/cluster/build_image.py

Debian takes the place of NVIDIA's images, under their names. Everything else is the Dockerfile's:
its stages, and every line but for apex and the kernels of flash-attn. It takes minutes, and 6 GB
that it removes.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MIRROR = "http://deb.debian.org/debian"
RELEASE = "bookworm"
"""Its Python is 3.11."""
TAG = "scalerun:check"

TRAIN = [
    "train", "data", "--task", "streaming_language_modeling", "--tokenizer", "bytes", "--arch",
    "lm_tiny", "--decoder-layers", "1", "--tokens-per-sample", "32", "--batch-size", "2",
    "--max-update", "2", "--cpu",
]  # fmt: skip


class Builder:
    """buildah with a storage of its own, in a folder that is removed."""

    def __init__(self, folder):
        self.folder = folder
        places = ["--root", folder / "images", "--runroot", folder / "run"]
        self.start = ["buildah", *map(str, places)]

    def __call__(self, *words, **options):
        command = [*self.start, *map(str, words)]
        return subprocess.run(command, check=True, text=True, **options)

    def read(self, *words):
        return self(*words, stdout=subprocess.PIPE).stdout.strip()


def bases(dockerfile):
    """Images that the stages start from, with the defaults of the arguments in their names."""
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile, re.M))
    names = re.findall(r"^FROM (\S+)", dockerfile, re.M)
    return {re.sub(r"\$\{(\w+)\}", lambda m: defaults[m[1]], name) for name in names}


def make_root(root, wheels):
    """A bare Debian whose pip finds what ours does."""
    command = ["debootstrap", "--variant=minbase", RELEASE, str(root), MIRROR]
    subprocess.run(command, check=True)
    lines = ["[global]"]
    if wheels is not None:
        shutil.copytree(wheels, root / "wheels")
        lines.append("find-links = /wheels")
    certificates = os.environ.get("PIP_CERT")
    if certificates:
        shutil.copyfile(certificates, root / "etc/certificates-of-the-host.crt")
        lines.append("cert = /etc/certificates-of-the-host.crt")
    (root / "etc/pip.conf").write_text("\n".join(lines) + "\n")


def build(buildah, arguments):
    """The image of the Dockerfile, on Debian under the names of its bases."""
    container = buildah.read("from", "scratch")
    buildah("add", "--quiet", container, buildah.folder / "root", "/")
    for name in bases((ROOT / "Dockerfile").read_text(encoding="utf-8")):
        buildah("commit", "--quiet", container, f"docker.io/{name}")
    buildah("rm", container)
    words = ["--format", "docker", "--pull-never", "--layers"]
    words += ["--isolation", "chroot", "--network", "host"]
    # flash-attn is then fetched, built and installed as always, but for its kernels.
    words += ["--env", "FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE"]
    for each in arguments:
        words += ["--build-arg", each]
    buildah("bud", *words, "--tag", TAG, ROOT)


def try_out(buildah):
    """Do in the image what its users do."""
    settings = json.loads(buildah.read("inspect", "--type", "image", TAG))["OCIv1"]["config"]
    container = buildah.read("from", "--pull-never", TAG)
    entry = settings["Entrypoint"]

    def run(*words, user=settings["User"]):
        options = ["--isolation", "chroot", "--user", user]
        return buildah.read("run", *options, container, "--", *words)

    assert run("id", "-u") == "10001"
    assert "train" in run(*entry, *settings["Cmd"])
    for name in ("gcc", "nvcc", "git"):
        assert run("sh", "-c", f"command -v {name} || true") == "", f"{name} is in the image"
    text = "".join(json.dumps({"text": f"Line {i}: the cat sleeps."}) + "\\n" for i in range(40))
    # The second user is nobody's: what --user gives to those who mount a folder of theirs.
    for user, home in ((settings["User"], "mine"), ("4711:4711", "yours")):
        train, valid = f"{home}/data/train/00", f"{home}/data/valid/a/00"
        write = f"mkdir -p {train} {valid}; printf '{text}' | tee {train}/a.jsonl > {valid}/a.jsonl"
        command = " ".join([*entry, *TRAIN, "--save-dir", "run"])
        run("sh", "-ec", f"{write}; cd {home}; {command}", user=user)
        assert run("cat", f"{home}/run/checkpoint_last", user=user) == "checkpoint_2"


def main():
    """Build, try out, remove."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, help="folder of wheels that pip may take from")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("arguments", nargs="*", metavar="NAME=VALUE", help="as for --build-arg")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="scalerun-image-", dir=chosen.folder))
    buildah = Builder(folder)
    try:
        make_root(folder / "root", chosen.wheels)
        build(buildah, chosen.arguments)
        try_out(buildah)
        print("the image was built on Debian, and trains")
    finally:
        subprocess.run([*buildah.start, "rm", "--all"], check=False)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
