"""What the documentation says can be done: every command, file, flag and link in it is tried."""

import argparse
import ast
import json
import random
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

import httpx
import pytest
import sentencepiece
import torch

from cpu_tests.cluster import commands as cluster
from cpu_tests.conftest import make_parallel_corpus
from cpu_tests.service.conftest import Server
from scalerun.cli.checkpoint import VERBS
from scalerun.cli.convert import ConvertConfig
from scalerun.cli.generate import GenerateConfig
from scalerun.cli.interactive_cli import InteractiveConfig
from scalerun.cli.interactive_ft import ChatConfig
from scalerun.cli.interactive_hosted import HostedConfig
from scalerun.cli.preprocess_config import PreprocessConfig
from scalerun.cli.registries import CHOOSERS
from scalerun.cli.train_tokenizer import TrainTokenizerConfig
from scalerun.cli.validate import ValidateConfig
from scalerun.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from scalerun.dataclass.configs import ScalerunConfig
from scalerun.dataclass.flags import flags_of
from scalerun.dataclass.foreign_flags import FOREIGN_FLAGS
from scalerun.dataclass.parser import BUILT_IN
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "projects/example_architecture"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), EXAMPLE / "README.md"]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]

SCRIPTS = {
    "scalerun-train": "train",
    "scalerun-validate": "validate",
    "scalerun-interactive": "interactive_cli",
    "scalerun-chat": "interactive_ft",
    "scalerun-generate": "generate",
    "scalerun-serve": "interactive_hosted",
    "scalerun-train-tokenizer": "train_tokenizer",
    "scalerun-convert": "convert",
    "scalerun-checkpoint": "checkpoint",
    "scalerun-preprocess": "preprocess",
}
SMALL = {
    "train": [
        "--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "32",
        "--decoder-attention-heads", "2", "--tokens-per-sample", "32", "--batch-size", "4",
        "--warmup-updates", "1", "--cpu",
    ],
    "train_tokenizer": ["--vocab-size", "300"],
    "validate": ["--cpu"],
    "interactive_cli": ["--cpu"],
    "interactive_ft": ["--cpu"],
    "generate": ["--cpu"],
    "interactive_hosted": ["--cpu", "--port", "0"],
    "convert": [],
    "checkpoint": [],
    "preprocess": [],
}  # fmt: skip
"""What is added to a command of the documentation, so that it takes no time."""
TRANSLATION = [
    "--encoder-layers", "2", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "32",
    "--encoder-attention-heads", "2",
]  # fmt: skip
"""What is added for the side that only a translator has."""

PARSE = "--print-config"

OTHERS_FLAGS = {
    "--editable", "--qk-norm-eps", "--standalone", "--nproc-per-node", "--max-restarts", "--nnodes",
    "--rdzv-backend", "--rdzv-endpoint", "--nodes", "--ntasks-per-node", "--kill-on-bad-exit",
    "--model", "--tasks", "--include", "--device", "--batch",
    "--no-build-isolation", "--clients", *cluster.FLAGS,
}  # fmt: skip
"""Of clusters, pip, the example architecture, torchrun, srun and the evaluation harness."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str

    @property
    def file(self):
        """The file that the block's first line names, if any."""
        match = re.match(r"# ([\w./-]+\.(?:py|yaml))\n", self.text)
        return match[1] if match else None


def blocks(page):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [Block(*each) for each in found]


def command_lines(block):
    joined = block.text.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def write_corpus(data, write_jsonl):
    draw = random.Random(1)
    words = ["".join(draw.choices("abdegiklnorst", k=draw.randint(2, 7))) for _ in range(200)]
    texts = [f"Once upon a time {' '.join(draw.choices(words, k=20))}.\n" for _ in range(24)]
    for name, mine in (("web", texts[:12]), ("books", texts[12:])):
        write_jsonl(data / f"train/00/{name}.jsonl", mine[::2])
        write_jsonl(data / f"train/01/{name}.jsonl", mine[1::2])
        write_jsonl(data / f"valid/{name}/00/{name}.jsonl", [f"The cat said: {mine[0]}"])


class Shell:
    """Does what a page tells a reader to do, in one folder."""

    def __init__(self, launch, home):
        self.launch = launch
        self.home = home
        self.num_updates = 2
        self.server = None

    def line(self, line):
        """One line of a ``bash`` block -> the finished command, or None where nothing was run."""
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|<")
        lexer.whitespace_split = True
        words = list(lexer)
        stdin = ""
        if "|" in words:
            cut = words.index("|")
            assert words[0] in ("echo", "printf")
            maker = subprocess.run(words[:cut], capture_output=True, text=True, check=True)
            stdin, words = maker.stdout, words[cut + 1 :]
        if "<" in words:
            cut = words.index("<")
            stdin, words = (self.home / words[cut + 1]).read_text(), words[:cut]
        if words[0] in SCRIPTS:
            return self.scalerun(SCRIPTS[words[0]], words[1:], stdin)
        if words[:2] == ["python", "-m"] and words[2].startswith("scalerun.cli."):
            return self.scalerun(words[2].removeprefix("scalerun.cli."), words[3:], stdin)
        if words[0] == "curl":
            [address] = [word for word in self.asked(words) if word.startswith("http")]
            httpx.post(address, content=words[words.index("-d") + 1]).raise_for_status()
            return None
        self.not_run(words)
        return None

    def scalerun(self, name, words, stdin):
        small = list(SMALL[name])
        if name == "train" and ("translation" in words or "mt_base" in words):
            small = [*TRANSLATION, *small[: small.index("--tokens-per-sample")], *small[-3:]]
        if name == "train":
            self.num_updates += 2  # so that a command that resumes has something left to do
            small += ["--max-update", str(self.num_updates)]
            if any(word.startswith("mlm") for word in words):
                small = [word.replace("decoder", "encoder") for word in small]
                small[small.index("--tokens-per-sample") + 1] = "128"
            if any(word.startswith("retnet") for word in words):
                small[small.index("--decoder-attention-heads")] = "--decoder-retention-heads"
        command = self.launch(self.home, name, *words, *small, stdin=stdin)
        if name == "interactive_hosted":
            self.end_server()
            self.server = Server(command).wait_until_it_serves()
            return command
        assert command.wait() == 0, f"{shlex.join([name, *words])}\n{command.stderr}"
        return command

    def asked(self, words):
        """Words that name the page's server, with the address of the one that was started."""
        return [word.replace("http://127.0.0.1:8000", self.server.url) for word in words]

    def end_server(self):
        """A server runs until the next one is started, or to the end of the page."""
        if self.server is not None:
            self.server.command.send(signal.SIGTERM)
            assert self.server.command.wait() == 0

    def not_run(self, words):
        """Commands that would install or test everything: what they name has to exist."""
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            makefile = (ROOT / "Makefile").read_text()
            assert targets
            assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
        elif words[0].endswith("pip"):
            extras = re.findall(r"\[(.*)\]", words[-1])
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            names = [name for each in extras for name in each.split(",")]
            assert set(names) <= set(known["optional-dependencies"])
        elif words[0] in ("torchrun", "srun"):
            self.scalerun("train", [*words[words.index("scalerun.cli.train") + 1 :], PARSE], "")
        elif words[0] == ".ci/run":
            assert (ROOT / words[0]).stat().st_mode & stat.S_IXUSR
        elif words == ["python3", "-m", "venv", ".venv"]:
            pass
        elif (started := cluster.check(words))[:1] == ["train"]:
            self.scalerun("train", [*started[1:], PARSE], "")


@pytest.fixture(scope="session")
def text_home(tmp_path_factory, write_jsonl):
    """A folder with ``my_text``, a ``plain_text``, and ``projects`` as in the repository."""
    home = tmp_path_factory.mktemp("text")
    (home / "projects").symlink_to(ROOT / "projects")
    (home / "prompts.txt").write_text("Once upon a time\n\nThe cat\n")
    write_corpus(home / "my_text", write_jsonl)
    pairs = make_parallel_corpus(home / "my_pairs")
    for language in ("en", "es"):
        shutil.copyfile(pairs / f"valid.{language}", pairs / f"test.{language}")
    write_jsonl(home / "plain_text/verse.jsonl", [f"The cat said {i}." * 9 for i in range(60)])
    return home


@pytest.fixture(scope="session")
def trained_home(launch, tmp_path_factory, text_home, torchscale_state):
    """The same after the first two commands of the README: with a tokenizer and a run."""
    home = tmp_path_factory.mktemp("trained") / "home"
    shutil.copytree(text_home, home, symlinks=True)
    shell = Shell(launch, home)
    for line in command_lines(path_to_text())[:2]:
        shell.line(line)
    write_foreign_weights(home, torchscale_state)
    return home


def write_foreign_weights(home, torchscale_state):
    """What a user of TorchScale has, of the sizes in SMALL."""
    size = len(SentencePieceTokenizer(home / "my_text.model").dictionary)
    torch.save(torchscale_state(vocab=size, num_layers=2), home / "weights.pt")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "the owl slept"] * 9),
        model_prefix=str(home / "pieces"),
        vocab_size=20,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(home / "pieces.model"))
    lines = [f"{model.id_to_piece(i)} 1\n" for i in range(19, 2, -1)]
    lines += [f"madeupword000{i} 0\n" for i in range(3)]
    (home / "dict.txt").write_text("".join(lines), encoding="utf-8")
    weights = torchscale_state("decoder.", vocab=4 + len(lines), num_layers=2)
    record = argparse.Namespace(arch="lm_base", decoder_attention_heads=2, subln=True)
    torch.save({"model": weights, "args": record}, home / "checkpoint_best.pt")


@pytest.fixture
def home(trained_home, tmp_path):
    """A copy of it, for one page."""
    return shutil.copytree(trained_home, tmp_path / "home", symlinks=True)


def path_to_text():
    """The README's block that leads from text to text."""
    [block] = [b for b in blocks(ROOT / "README.md") if "train_tokenizer" in b.text]
    return block


def test_three_commands_lead_from_a_folder_of_text_to_generated_text(launch, text_home, tmp_path):
    assert len(command_lines(path_to_text())) == 3
    shell = Shell(launch, shutil.copytree(text_home, tmp_path / "home", symlinks=True))
    shown = [block for block in blocks(ROOT / "README.md") if block.language == "bash"]
    readme = [line for block in shown for line in command_lines(block)]
    done = {line: shell.line(line) for line in readme}
    answer = done[command_lines(path_to_text())[-1]]
    assert answer.stdout.startswith("Once upon a time")
    assert len(answer.stdout) > len("Once upon a time\n")


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES[1:])  # the README: see above
def test_every_command_of_a_page_works(launch, home, name, monkeypatch):
    shell = Shell(launch, home)
    monkeypatch.chdir(home)
    quoted = (EXAMPLE / "qk_norm.py").read_text(encoding="utf-8")
    for block in blocks(ROOT / name):
        if block.file is not None:
            file = home / block.file
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        if block.language == "bash":
            for line in command_lines(block):
                shell.line(line)
        elif block.file is not None and block.file.startswith("torchscale"):
            assert block.language == "yaml"  # TorchScale's fields, for the converter
        elif block.language == "yaml":
            (home / "block.yaml").write_text(block.text, encoding="utf-8")
            shell.line("python -m scalerun.cli.train --config block.yaml --print-config")
        elif block.language == "python" and name == "docs/add_an_architecture.md":
            assert block.text in quoted
        elif block.language == "python" and block.file is None:
            [text] = shell.asked([block.text]) if shell.server else [block.text]
            exec(compile(ast.parse(text), f"{name}, python block", "exec"), {})
        elif block.language == "json":
            assert json.loads(block.text)
        elif block.language == "toml":
            assert tomllib.loads(block.text)
        else:
            assert block.language in ("text", "python")
    shell.end_server()


def flags_of_everything():
    """Every spelling that any command understands."""
    root = ScalerunConfig()
    groups = [
        ChatConfig(),
        InteractiveConfig(),
        ValidateConfig(),
        TrainTokenizerConfig(),
        ConvertConfig(),
    ]
    groups += [PreprocessConfig(), GenerateConfig(), HostedConfig()]
    groups += [config_class() for config_class, _, _ in VERBS.values()]
    groups += [g for g in vars(root).values() if isinstance(g, ScalerunDataclass)]
    groups += [c.config_for(name) for c in CHOOSERS.values() for name in c.names()]
    spellings = {
        spelling
        for group in groups
        for flag in flags_of(group, "")
        for spelling in flag.spellings + flag.negations
    }
    slots = {f.metadata["component"] for f in fields(root) if "component" in f.metadata}
    return spellings | slots | set(BUILT_IN)


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_that_a_page_names_exists(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))
    assert named - OTHERS_FLAGS - set(FOREIGN_FLAGS) <= flags_of_everything()


def slugs(page):
    """Anchors that a page's headings give."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", NAMES)
def test_every_relative_link_leads_somewhere(name):
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in slugs(target), link


def test_the_readme_leads_to_every_page():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f"](docs/{page.name})" in readme


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_short(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) < 200
