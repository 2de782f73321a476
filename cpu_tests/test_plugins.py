"""Code from outside the package: found, registered, remembered by the run, named in errors."""

import os
import subprocess
import sys
import textwrap

import pytest

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.plugins import load_plugins, plugin_errors

MODEL = """
    from dataclasses import dataclass

    from scalerun.dataclass.scalerun_dataclass import option
    from scalerun.models.base_model import register_model, register_model_architecture
    from scalerun.models.transformer_config import TransformerConfig
    from scalerun.models.transformer_lm import TransformerLM


    @dataclass
    class MyConfig(TransformerConfig):
        my_factor: float = option(1.0, "multiplies the logits")


    @register_model("my_lm", MyConfig)
    class MyLM(TransformerLM):
        @classmethod
        def build_model(cls, cfg, *, vocab_size, padding_idx, meshes):
            model = super().build_model(
                cfg, vocab_size=vocab_size, padding_idx=padding_idx, meshes=meshes
            )
            model.my_factor = cfg.my_factor
            return model

        def forward(self, tokens_BT, **inputs):
            output = super().forward(tokens_BT, **inputs)
            return output._replace(logits=self.my_factor * output.logits)


    @register_model_architecture("my_lm", "my_lm_tiny")
    def my_lm_tiny():
        return MyConfig(
            decoder_embed_dim=16, decoder_ffn_embed_dim=32, decoder_layers=1,
            decoder_attention_heads=2, my_factor=0.5,
        )
"""

OPTIMIZER = """
    from dataclasses import dataclass

    import torch

    from scalerun.dataclass.scalerun_dataclass import option
    from scalerun.optim.base_optimizer import BaseOptimizer, OptimizerConfig, register_optimizer

    from .names import SIGN


    @dataclass
    class SignConfig(OptimizerConfig):
        sign_power: float = option(0.0, "exponent of the gradient's size")


    @register_optimizer(SIGN, SignConfig)
    class SignDescent(BaseOptimizer):
        def make_optimizer(self, groups):
            return torch.optim.SGD(groups, lr=0.0)

        def blank_state(self, param):
            return {}

        def step(self):
            for param in self.params:
                param.grad = param.grad.sign() * param.grad.abs() ** self.cfg.sign_power
            super().step()
"""

TASK = """
    from dataclasses import dataclass

    import torch

    from scalerun.data.base_dataset import BaseDataset, DatasetCounts
    from scalerun.data.batch import Batch
    from scalerun.data.tokenizers.dictionary import Dictionary
    from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
    from scalerun.tasks.base_task import BaseTask, register_task


    @dataclass
    class CountingConfig(ScalerunDataclass):
        count_length: int = option(8, "numbers in a sequence")
        count_sequences: int = option(20, "sequences in an epoch")


    class Counting(BaseDataset):
        def __init__(self, cfg):
            self.cfg = cfg

        @property
        def fingerprint(self):
            return repr(self.cfg)

        def num_shards(self):
            return 1

        def shard(self, epoch, index):
            return range(self.cfg.count_sequences)

        def collate(self, samples, sample_ids):
            rows = [torch.arange(s, s + self.cfg.count_length + 1) % 30 for s in samples]
            numbers = torch.stack(rows)
            return Batch(
                tokens=numbers[:, :-1], targets=numbers[:, 1:],
                num_targets=numbers[:, 1:].numel(), sample_ids=list(sample_ids),
            )

        def counts(self):
            sequences = self.cfg.count_sequences
            return DatasetCounts(sequences, sequences * self.cfg.count_length, num_bytes=0)


    @register_task("counting", CountingConfig)
    class CountingTask(BaseTask):
        @classmethod
        def setup_task(cls, cfg, *, seed, cache_dir, quarantine):
            task = cls(cfg)
            task.sequence_length = cfg.count_length
            task.dictionary = Dictionary(
                num_real_symbols=32, bos=30, eos=30, pad=31, unk=None, digest="counting"
            )
            return task

        def read_dataset(self, split, *, training):
            return Counting(self.cfg)

        def valid_subsets(self, names):
            return ["valid"]
"""

FILES = {
    "names.py": 'SIGN = "sign_descent"',
    "model.py": MODEL,
    "optimizer.py": OPTIMIZER,
    "task.py": TASK,
}
CHOICES = [
    "--task", "counting", "--count-length", "6", "--arch", "my_lm_tiny", "--my-factor", "0.75",
    "--optimizer", "sign_descent", "--sign-power", "0.5", "--batch-size", "4", "--lr", "0.01",
    "--lr-scheduler", "constant", "--max-update", "3", "--log-interval", "1", "--cpu",
]  # fmt: skip


def write_files(folder, files):
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


@pytest.mark.parametrize("init", [{}, {"__init__.py": "from . import model, optimizer, task"}])
def test_one_run_uses_a_model_an_optimizer_and_a_task_from_a_folder_outside_the_tree(
    run, records, tmp_path, init
):
    folder = write_files(tmp_path / "else where/plugins", {**FILES, **init})
    command = run("train", "--user-dir", folder, *CHOICES, "--save-dir", "run")
    assert command.code == 0, command.stderr
    assert [r["wpb"] for r in records(tmp_path / "run", "train")] == [24.0] * 3
    config = (tmp_path / "run/config.yaml").read_text()
    for line in ("my_factor: 0.75", "sign_power: 0.5", "count_length: 6", "_name: my_lm_tiny"):
        assert line in config
    # The run knows its plug-ins: nobody has to name them again.
    assert run("train", "--config", "run/config.yaml", "--max-update", "5").code == 0
    score = run("validate", "--path", "run", "--cpu", "--json", "valid.json")
    assert score.code == 0, score.stderr
    assert "120" in score.stdout
    ask = run("interactive_cli", "--path", "run", "--cpu", stdin="1 2 3\n")
    assert ask.code == 1
    assert "no tokenizer" in ask.error


def test_a_run_whose_plug_ins_have_moved_says_so_and_takes_their_new_place(run, tmp_path):
    folder = write_files(tmp_path / "plugins", FILES)
    assert run("train", "--user-dir", folder, *CHOICES, "--save-dir", "run").code == 0
    folder.rename(tmp_path / "moved")
    command = run("validate", "--path", "run", "--cpu")
    assert command.code == 2
    assert command.error.endswith("is not a folder; give the one with the plug-in code")
    moved = run("validate", "--path", "run", "--cpu", "--user-dir", tmp_path / "moved")
    assert moved.code == 0, moved.stderr


def test_an_installed_plug_in_announces_itself(tmp_path, corpus, tiny):
    site = write_files(
        tmp_path / "site/my_plugins", {**FILES, "__init__.py": "from . import model"}
    )
    write_files(
        tmp_path / "site/my_plugins-1.0.dist-info",
        {
            "METADATA": "Metadata-Version: 2.1\nName: my-plugins\nVersion: 1.0\n",
            "entry_points.txt": "[scalerun.plugins]\nmine = my_plugins\n",
        },
    )
    words = [*tiny, "--arch", "my_lm", "--my-factor", "0.5", "--max-update", "1"]
    command = subprocess.run(
        [sys.executable, "-m", "scalerun.cli.train", corpus, *words, "--save-dir", "run"],
        env={**os.environ, "PYTHONPATH": str(site.parent), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert command.returncode == 0, command.stderr
    assert "my_factor: 0.5" in (tmp_path / "run/config.yaml").read_text()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Makes the one installed plug-in: its module's text -> the module's file."""

    def site(text, value="broken_plugin"):
        folder = tmp_path / "site"
        write_files(folder, {"broken_plugin.py": text})
        points = {"entry_points.txt": f"[scalerun.plugins]\nmine = {value}\n"}
        write_files(folder / "broken-1.0.dist-info", {"METADATA": "Name: broken\n", **points})
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, "broken_plugin", raising=False)
        return folder / "broken_plugin.py"

    return site


FAULTS = {
    "an exception": ("x = 1\ny = x / 0\n", 2, "ZeroDivisionError"),
    "a syntax error": ("x = 1\n\ny = (\n", 3, "SyntaxError"),
    "a package that is missing": ("import no_such_package\n", 1, "ModuleNotFoundError"),
    "a name that is taken": (
        "from scalerun.models.base_model import register_model\n"
        "from scalerun.models.transformer_config import TransformerConfig\n"
        "from scalerun.models.transformer_lm import TransformerLM\n"
        'register_model("transformer_lm", TransformerConfig)(TransformerLM)\n',
        4,
        "--arch 'transformer_lm' is already scalerun.models.transformer_lm.TransformerLM",
    ),
    "a method that is missing": (
        "from dataclasses import dataclass\n"
        "from scalerun.criterions.base_criterion import BaseCriterion, register_criterion\n"
        "from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass\n"
        "@dataclass\n"
        "class C(ScalerunDataclass): ...\n"
        '@register_criterion("x", C)\n'
        "class X(BaseCriterion): ...\n",
        6,
        "X does not define forward",
    ),
    "a class without the base": (
        "from scalerun.models.base_model import register_model\n"
        "from scalerun.models.transformer_config import TransformerConfig\n"
        '@register_model("x", TransformerConfig)\n'
        "class X: ...\n",
        3,
        "X must derive from BaseModel",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_in_a_plug_in_names_its_file_and_line(tmp_path, site, fault):
    text, line, says = FAULTS[fault]
    folder = write_files(tmp_path / "plugins", {"mine.py": text})
    with pytest.raises(UserError, match=says) as caught:
        load_plugins(str(folder))
    assert str(caught.value).startswith(f"--user-dir: {folder / 'mine.py'}:{line}: ")
    file = site(text)
    with pytest.raises(UserError, match=says) as caught:
        load_plugins(None)
    named = "the installed plug-in mine (broken_plugin): "
    assert str(caught.value).startswith(f"{named}{file}:{line}: ")


CONSTRUCTOR = """
from dataclasses import dataclass
from scalerun.criterions import register_criterion
from scalerun.criterions.cross_entropy import CrossEntropy
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass

@dataclass
class BrokenConfig(ScalerunDataclass):
    pass

@register_criterion("broken", BrokenConfig)
class Broken(CrossEntropy):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.weight = 1 / 0
"""


def test_an_error_in_a_plug_ins_constructor_names_its_file_and_line(run, corpus, tiny, tmp_path):
    folder = write_files(tmp_path / "constructor", {"mine.py": CONSTRUCTOR})
    words = [*tiny, "--user-dir", folder, "--criterion", "broken", "--max-update", "1"]
    command = run("train", corpus, *words)
    assert command.code == 1
    place = f"{folder / 'mine.py'}:15"
    assert command.error == f"error: {place}: ZeroDivisionError: division by zero; repair it"
    assert "Traceback" not in command.stderr


def test_an_error_of_our_own_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), plugin_errors():
        1 / 0  # noqa: B018


def test_an_installed_plug_in_whose_module_is_gone_is_named(site):
    site("", value="gone_plugin")
    with pytest.raises(
        UserError, match=r"plug-in mine \(gone_plugin\): ModuleNotFoundError: No mod"
    ):
        load_plugins(None)


def test_a_folder_that_failed_can_be_repaired_and_imported_again(tmp_path):
    folder = write_files(tmp_path / "mended", {"mine.py": "1 / 0"})
    with pytest.raises(UserError):
        load_plugins(str(folder))
    (folder / "mine.py").write_text("DONE = True")
    load_plugins(str(folder))
    load_plugins(str(folder))
    assert sys.modules["scalerun_user_modules.mended.mine"].DONE


def test_a_folder_without_plug_ins_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        load_plugins(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"holds no \.py file"):
        load_plugins(str(tmp_path))
    for name in ("a", "b"):
        write_files(tmp_path / name / "same", {"mine.py": ""})
    load_plugins(str(tmp_path / "a/same"))
    with pytest.raises(ConfigError, match="another folder named same is already loaded"):
        load_plugins(str(tmp_path / "b/same"))


def test_two_components_with_one_flag_are_both_named(run, corpus, tiny, tmp_path):
    clash = OPTIMIZER.replace("sign_power", "decoder_layers").replace(".names", ".others")
    folder = write_files(tmp_path / "clash", {"others.py": FILES["names.py"], "clash.py": clash})
    words = [*tiny, "--user-dir", folder, "--optimizer", "sign_descent", "--max-update", "1"]
    command = run("train", corpus, *words)
    assert command.code == 2
    assert "--decoder-layers belongs to both --arch transformer_lm and --optimizer sign_desc" in (
        command.error
    )
