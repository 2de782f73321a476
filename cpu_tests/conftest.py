"""What many tests share: the commands as real processes, and small corpora."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# A busy machine is no reason to fail.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

HERE = Path(__file__).parent
ROOT = HERE.parent


class ForkServer:
    """Speaks with ``fork_server.py``."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "fork_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )

    def ask(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(10)


@dataclass
class Command:
    """One started command."""

    server: ForkServer
    pid: int
    folder: Path
    code: int | None = field(default=None)

    @property
    def stdout(self):
        return (self.folder / "stdout").read_text(encoding="utf-8")

    @property
    def stderr(self):
        return (self.folder / "stderr").read_text(encoding="utf-8")

    def poll(self):
        if self.code is None:
            answer = self.server.ask({"poll": self.pid})
            self.code = answer["code"] if answer else None
        return self.code

    def wait(self, timeout=120):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                self.send(signal.SIGKILL)
                raise TimeoutError(f"no end after {timeout} s:\n{self.stderr}")
            time.sleep(0.01)
        return self.code

    def send(self, signum):
        os.kill(self.pid, signum)

    def kill(self):
        """Kill -9, of the command alone: what it started has to end by itself."""
        self.send(signal.SIGKILL)
        return self.wait()

    @property
    def error(self):
        """The one sentence that a failed command prints."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        return lines[0] if len(lines) == 1 else ""


@pytest.fixture(scope="session")
def fork_server():
    server = ForkServer()
    yield server
    server.close()


def launch(server, home, name, *argv, stdin="", cwd=None, env=None):
    """Start a command; its streams are files below ``home``."""
    folder = home / f"command_{len(list(home.glob('command_*'))) + 1}"
    folder.mkdir()
    for stream, text in (("stdin", stdin), ("stdout", ""), ("stderr", "")):
        (folder / stream).write_text(text, encoding="utf-8")
    request = {
        "module": f"scalerun.cli.{name}",
        "argv": [str(word) for word in argv],
        "cwd": str(cwd or home),
        "env": env or {},
        **{stream: str(folder / stream) for stream in ("stdin", "stdout", "stderr")},
    }
    return Command(server, server.ask({"start": request})["pid"], folder)


@pytest.fixture(name="launch", scope="session")
def launch_fixture(fork_server):
    """Start a command whose streams are files below a folder: ``launch(folder, "train", …)``."""
    return functools.partial(launch, fork_server)


@pytest.fixture
def start(fork_server, tmp_path):
    """Start a command: ``start("train", "DATA", "--arch", …)`` -> :class:`Command`."""

    def start(name, *argv, **options):
        return launch(fork_server, tmp_path, name, *argv, **options)

    return start


@pytest.fixture
def run(start):
    """Run a command to its end."""

    def run(name, *argv, **options):
        command = start(name, *argv, **options)
        command.wait()
        return command

    return run


def write_jsonl(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_corpus(data):
    verse = [
        f"Line {i}: the {word} sleeps.\n" * 3 for i, word in enumerate("cat dog owl".split() * 9)
    ]
    write_jsonl(data / "train/00/verse.jsonl", verse[:14])
    write_jsonl(data / "train/01/verse.jsonl", verse[14:])
    write_jsonl(data / "valid/first/00/verse.jsonl", verse[:2])
    write_jsonl(data / "valid/second/00/verse.jsonl", ["Another voice, the fox's."])
    return data


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def make_parallel_corpus(data):
    """``train.en``, ``train.es``, ``valid.en``, ``valid.es``: 46 and 6 pairs of many lengths."""
    english_words = "the cat dog sees a big red house".split()
    spanish_words = "el gato perro ve un grande rojo casa".split()
    words = dict(zip(english_words, spanish_words, strict=True))
    english = [[*words][i % 8 :: 1 + i % 3][: 1 + i % 5] * (1 + i % 2) for i in range(46)]
    spanish = [[words[word] for word in line] for line in english]
    for name, part in (("train", slice(None)), ("valid", slice(3, 9))):
        for language, lines in (("en", english), ("es", spanish)):
            write_lines(data / f"{name}.{language}", [" ".join(line) for line in lines[part]])
    return data


@pytest.fixture
def parallel_corpus(tmp_path):
    """A folder of English and Spanish lines, a few kilobytes."""
    return make_parallel_corpus(tmp_path / "parallel")


@pytest.fixture
def corpus(tmp_path):
    """A folder with two training shards and two validation sets, a few kilobytes."""
    return make_corpus(tmp_path / "data")


TINY = [
    "--task", "streaming_language_modeling", "--tokenizer", "bytes", "--tokens-per-sample", "32",
    "--arch", "transformer_lm", "--decoder-layers", "2", "--decoder-embed-dim", "16",
    "--decoder-ffn-embed-dim", "32", "--decoder-attention-heads", "2", "--dropout", "0.1",
    "--batch-size", "4", "--lr", "0.01", "--log-interval", "1", "--cpu", "--log-format", "simple",
]  # fmt: skip


@pytest.fixture
def tiny():
    """Flags of a model that trains in milliseconds."""
    return list(TINY)


def records(save_dir, kind, **wanted):
    """Records of ``metrics.jsonl`` of one kind, or with None of all."""
    text = (Path(save_dir) / "metrics.jsonl").read_text(encoding="utf-8")
    # A running command may be in the middle of its last line.
    found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [
        r
        for r in found
        if kind in (None, r["kind"]) and all(r.get(key) == value for key, value in wanted.items())
    ]


@pytest.fixture(scope="session")
def undisturbed(fork_server, tmp_path_factory):
    """Train the tiny model on the corpus to the end -> its run folder."""

    def undisturbed(name, words):
        home = tmp_path_factory.mktemp(name)
        data = make_corpus(home / "data")
        command = launch(fork_server, home, "train", data, *TINY, *words, "--save-dir", name)
        assert command.wait() == 0, command.stderr
        return home / name

    return undisturbed


@pytest.fixture(name="records", scope="session")
def records_fixture():
    return records


@pytest.fixture(name="write_lines", scope="session")
def write_lines_fixture():
    return write_lines


@pytest.fixture(name="write_jsonl", scope="session")
def write_jsonl_fixture():
    return write_jsonl


def torchscale_state(
    prefix="",
    *,
    vocab=264,
    cross=False,
    output=True,
    halves=("",),
    dim=16,
    ffn_dim=32,
    num_layers=1,
):
    """Random weights in TorchScale's names, of a SubLN stack without positions.

    ``halves`` are those of multiway layers: ``(".A", ".B")``.
    """
    shapes = {"embed_tokens.weight": (vocab, dim)}
    if output:
        shapes["output_projection.weight"] = (vocab, dim)
    for half in halves:
        norms = {f"layer_norm{half}": dim}
        linears = {}
        for layer in (f"layers.{i}" for i in range(num_layers)):
            for name in ("q", "k", "v", "out"):
                linears[f"{layer}.self_attn.{name}_proj{half}"] = (dim, dim)
                if cross:
                    linears[f"{layer}.encoder_attn.{name}_proj"] = (dim, dim)
            linears[f"{layer}.ffn{half}.fc1"] = (ffn_dim, dim)
            linears[f"{layer}.ffn{half}.fc2"] = (dim, ffn_dim)
            norms[f"{layer}.ffn{half}.ffn_layernorm"] = ffn_dim
            own = ("self_attn_layer_norm", "final_layer_norm", "self_attn.inner_attn_ln")
            norms |= {f"{layer}.{name}{half}": dim for name in own}
            if cross:
                norms[f"{layer}.encoder_attn_layer_norm"] = dim
        shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
        shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
        for kind in ("weight", "bias"):
            shapes |= {f"{name}.{kind}": (width,) for name, width in norms.items()}
    generator = torch.Generator().manual_seed(1)
    return {
        prefix + key: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 + (len(shape) == 1)
        for key, shape in shapes.items()
    }


@pytest.fixture(name="torchscale_state", scope="session")
def torchscale_state_fixture():
    return torchscale_state
