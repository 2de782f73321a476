"""Laws of the command line: precedence, literals, refusals, and round trips through YAML."""

import string
from dataclasses import dataclass

import pytest

from scalerun.dataclass.configs import ScalerunConfig
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.parser import config_from_dict, parse_config
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.registry import Registry


@dataclass
class ToyTaskConfig(ScalerunDataclass):
    data: str | None = option(None, "the folder", positional=True)
    corpus_weights: dict[str, float] = option({}, "weights")
    note: str | None = option(None, "any text")


@dataclass
class ToyModelConfig(ScalerunDataclass):
    decoder_layers: int = option(3, "layers")
    decoder_embed_dim: int = option(16, "width")


@dataclass
class ToyAdamConfig(ScalerunDataclass):
    adam_betas: list[float] = option([0.9, 0.98], "decay rates")
    amsgrad: bool = option(False, "a switch")


@dataclass
class ToySgdConfig(ScalerunDataclass):
    momentum: float = option(0.0, "momentum")


@dataclass
class ClashingConfig(ScalerunDataclass):
    momentum: float = option(0.0, "momentum too")


@dataclass
class EmptyConfig(ScalerunDataclass):
    pass


class Presets:
    """A preset is a whole configuration, like an architecture."""

    def names(self):
        return ["toy", "toy_deep"]

    def kinds(self):
        return ["toy"]

    def config_for(self, name):
        layers = {"toy": 3, "toy_deep": 48}[name]
        return ToyModelConfig(decoder_layers=layers).named(name)


def registry(flag, **configs):
    made = Registry(flag, object)
    for name, config_class in configs.items():
        made.register(name, config_class)(type(name, (), {}))
    return made


CHOOSERS = {
    "task": registry("--task", toy=ToyTaskConfig),
    "model": Presets(),
    "criterion": registry("--criterion", cross_entropy=EmptyConfig),
    "optimizer": registry("--optimizer", adam=ToyAdamConfig, sgd=ToySgdConfig),
    "lr_scheduler": registry("--lr-scheduler", cosine=EmptyConfig, clashing=ClashingConfig),
}
REQUIRED = ["--task", "toy", "--arch", "toy", "--batch-size", "4", "--max-update", "10"]


def parse(*words, required=True):
    argv = [*(REQUIRED if required else []), *words]
    return parse_config(ScalerunConfig, argv, prog="train", choosers=CHOOSERS)


def refusal(*words, required=True):
    with pytest.raises(ConfigError) as caught:
        parse(*words, required=required)
    return str(caught.value)


def test_precedence_is_default_then_preset_then_file_then_flag(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("model: {decoder_embed_dim: 32}\noptimization: {clip_norm: 1}\n")
    second.write_text("model: {decoder_embed_dim: 64}\n")
    deep = ["--arch", "toy_deep"]
    assert parse(*deep).model.decoder_embed_dim == 16
    assert parse(*deep).model.decoder_layers == 48
    cfg = parse(*deep, "--config", str(first), "--config", str(second))
    assert (cfg.model.decoder_layers, cfg.model.decoder_embed_dim) == (48, 64)
    assert cfg.optimization.clip_norm == 1.0
    cfg = parse("--decoder-embed-dim", "8", "--config", str(first), *deep, "--decoder-layers=2")
    assert (cfg.model.decoder_layers, cfg.model.decoder_embed_dim) == (2, 8)


def test_components_can_be_chosen_in_a_file(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "task: {_name: toy, data: D}\nmodel: {_name: toy_deep}\n"
        "optimizer: {_name: sgd, momentum: 0.5}\n"
        "dataset: {batch_size: 2}\noptimization: {max_update: 1}\n"
    )
    cfg = parse("--config", str(path), required=False)
    assert (cfg.task.data, cfg.model.decoder_layers, cfg.optimizer.momentum) == ("D", 48, 0.5)


@pytest.mark.parametrize("text", ["0.8,0.9", "[0.8, 0.9]", "(0.8,0.9)", "0.8,0.9,"])
def test_lists_are_literals_in_any_bracket(text):
    assert parse("--adam-betas", text).optimizer.adam_betas == [0.8, 0.9]


def test_repeated_list_flags_add_up_and_repeated_scalars_keep_the_last():
    cfg = parse("--skip-batches", "1-2", "--skip-batches", "5", "--seed", "3", "--seed", "4")
    assert cfg.dataset.skip_batches == ["1-2", "5"]
    assert cfg.common.seed == 4


def test_an_empty_list_forgets_what_was_given_before():
    cfg = parse("--skip-batches", "1-2", "--skip-batches", "[]")
    assert cfg.dataset.skip_batches == []
    cfg = parse("--skip-batches", "1-2", "--skip-batches", "[]", "--skip-batches", "5")
    assert cfg.dataset.skip_batches == ["5"]


def test_a_positional_list_takes_all_free_words_and_keeps_their_commas():
    @dataclass
    class ManyConfig(ScalerunDataclass):
        paths: list[str] = option([], "what to read", positional=True)
        count: int = option(0, "a number")

    cfg = parse_config(ManyConfig, ["a,b", "--count", "2", "c d", "e"], prog="many")
    assert (cfg.paths, cfg.count) == (["a,b", "c d", "e"], 2)
    assert parse_config(ManyConfig, [], prog="many").paths == []


def test_dict_flags_map_names_to_numbers():
    assert parse("--corpus-weights", "web=0.7,books=.3").task.corpus_weights == {
        "web": 0.7,
        "books": 0.3,
    }


def test_every_boolean_has_both_forms():
    for name in ("bf16", "save-async", "amsgrad"):
        field = name.replace("-", "_")
        for word, value in (
            (f"--{name}", True),
            (f"--no-{name}", False),
            (f"--{name}=false", False),
        ):
            cfg = parse(word)
            found = {**vars(cfg.common), **vars(cfg.checkpoint), **vars(cfg.optimizer)}[field]
            assert found is value


def test_aliases_mean_the_same():
    words = ["--task", "toy", "--arch", "toy", "--max-sentences", "7", "--max-update", "1"]
    assert parse(*words, required=False).dataset.batch_size == 7


@pytest.mark.parametrize(
    "text", ["__import__('os')", "2**3", "1e3", "0x10", "1.0", "ten", "", "nan", "None"]
)
def test_nothing_is_evaluated(text):
    assert "whole number" in refusal("--max-update", text)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1+1", "1e999"])
def test_numbers_are_finite_literals(text):
    assert "number" in refusal("--clip-norm", text)


def test_forty_typos_are_refused_and_named():
    """One character of a flag changed, dropped, doubled or swapped."""
    flags = [
        "--batch-size", "--max-update", "--clip-norm", "--update-freq", "--save-dir",
        "--log-interval", "--keep-last-updates", "--adam-betas", "--decoder-layers", "--seed",
    ]  # fmt: skip
    right = 0
    for i, flag in enumerate(flags):
        at = 4 + i % (len(flag) - 5)
        letter = string.ascii_lowercase[i]
        for typo in (
            flag[:at] + letter + flag[at + 1 :],
            flag[:at] + flag[at + 1 :],
            flag[:at] + flag[at] + flag[at:],
            flag[:at] + flag[at + 1] + flag[at] + flag[at + 2 :],
        ):
            if typo == flag:
                typo = flag + "x"
            message = refusal(typo, "1")
            assert message.startswith(f"{typo} is not a flag")
            right += f"did you mean {flag}" in message
    assert right >= 38


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--momentum", "0.9"], "--momentum belongs to --optimizer sgd, but --optimizer is adam"),
        (["--optimizer", "adm"], "--optimizer 'adm' is not known; did you mean adam?"),
        (["--log-format", "jsno"], "--log-format: 'jsno' is not a choice; did you mean json?"),
        (["--fp16", "--bf16"], "--fp16 and --bf16 exclude each other"),
        (["--batch", "4"], "--batch is not a flag; did you mean"),
        (["--batch-size"], "--batch-size expects a value"),
        (["--batch-size", "--cpu"], "--batch-size expects a value"),
        (["--no-cpu=1"], "--no-cpu takes no value"),
        (["--cpu=maybe"], "--cpu: 'maybe' is not true or false"),
        (["DATA", "MORE"], "'MORE' is not expected here"),
        (["-lr", "1"], "-lr is not a flag"),
        (["--skip-batches", "9-3"], "empty range"),
        (["--update-freq", "0"], "--update-freq is [0]"),
        (["--corpus-weights", "a=1,b"], "name=value"),
        (["--corpus-weights", "a=1,a=2"], "twice"),
        (["--adam-betas", "[0.9,0.98"], "does not close it"),
        (["--optimizer", "sgd", "--lr-scheduler", "clashing"], "belongs to both --optimizer sgd"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml cannot be read"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--num-workers", "99999999"], "--num-workers is 99999999; give 0 to 512"),
        (["--ema-decay", "1"], "--ema-decay is 1"),
        (["--patience", "3", "--disable-validation"], "--patience needs validation"),
        (["--no-save", "--save-interval-updates", "5"], "contradict"),
    ],
)
def test_wrong_command_lines_end_in_one_sentence(words, says):
    message = refusal(*words)
    assert says in message
    assert "\n" not in message


def test_required_choices_are_listed():
    message = refusal("--arch", "toy", required=False)
    assert "--task is required" in message
    assert "toy" in message


def test_a_run_that_never_ends_is_refused():
    message = refusal("--task", "toy", "--arch", "toy", "--batch-size", "1", required=False)
    assert "never end" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "optimization:\n  clip_nrom: 1\n",
            ":2 sets optimization.clip_nrom, which is no setting; did",
        ),
        (
            "optimisation: {}\n",
            ":1 sets optimisation, which is no setting; did you mean optimization",
        ),
        ("optimization:\n  max_update: many\n", ":2 sets optimization.max_update to a wrong value"),
        ("common:\n  log_format: xml\n", "--log-format: 'xml' is not a choice"),
        ("a: [1\n", "is not YAML"),
        ("- 1\n", "holds a list"),
        ("3\n", "must be a mapping of settings"),
        ("just text\n", "must be a mapping of settings"),
        ("optimizer: {adam_betas: 0.9}\n", ":1 sets optimizer.adam_betas to a wrong value"),
        ("optimizer: {adam_betas: {a: 1}}\n", ":1 sets optimizer.adam_betas to a wrong value"),
        ("dataset: {batch_size: [4]}\n", ":1 sets dataset.batch_size to a wrong value"),
        ("task: {corpus_weights: [1]}\n", ":1 sets task.corpus_weights to a wrong value"),
        (
            "optimizer:\n  momentum: 1\n",
            ":2 sets optimizer.momentum, which belongs to --optimizer sgd, but --optimizer is adam",
        ),
        ("common: 3\n", "no settings under common"),
        ("optimization: {clip_norm: .nan}\n", "--clip-norm: nan is not a finite number"),
        (
            "dataset: {batch_size: '${oc.env:NO_SUCH}'}\n",
            "sets dataset.batch_size to a wrong value",
        ),
    ],
)
def test_wrong_files_are_refused_with_their_line(tmp_path, text, says):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    message = refusal("--config", str(path))
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("common: {}\narch: toy\n", ":2 chooses no component by arch;"),
        ("model:\n  arch: toy\n", ":2 chooses no component by model.arch;"),
        ("model: toy\n", ":1 chooses no component by model;"),
    ],
)
def test_a_file_that_spells_a_choice_as_a_flag_is_told_how_to_write_it(tmp_path, text, where):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    words = ["--config", str(path), "--task", "toy", "--batch-size", "4", "--max-update", "1"]
    with pytest.raises(ConfigError) as caught:
        parse(*words, required=False)
    assert str(caught.value) == (
        f"--config {path}{where} write model: {{_name: NAME}} for --arch NAME"
    )
    path.write_text("model: {_name: toy}\n")
    assert parse(*words, required=False).model._name == "toy"


def test_a_foreign_flag_names_models_and_no_more_than_five():
    class Many(Presets):
        """Seven models with a setting in common, and one without it."""

        def kinds(self):
            return [f"wide{i}" for i in range(7)] + ["toy"]

        def config_for(self, name):
            return (ClashingConfig() if name.startswith("wide") else ToyModelConfig()).named(name)

    with pytest.raises(ConfigError) as caught:
        parse_config(
            ScalerunConfig,
            [*REQUIRED, "--momentum", "1"],
            prog="train",
            choosers=CHOOSERS
            | {"model": Many(), "optimizer": registry("--optimizer", adam=EmptyConfig)},
        )
    assert "--arch wide0 or wide1 or wide2 or wide3 or wide4 …, but" in str(caught.value)


def test_a_file_that_describes_another_component_is_refused(tmp_path):
    """Its sizes would silently replace those of the preset that was chosen."""
    path = tmp_path / "a.yaml"
    path.write_text("model: {_name: toy, decoder_layers: 3}\n")
    message = refusal("--config", str(path), "--arch", "toy_deep")
    assert "describes the model toy, but toy_deep is chosen" in message


def test_a_printed_configuration_reads_back_to_itself(tmp_path, capsys):
    words = ["DATA", "--corpus-weights", "a=1", "--note", r"$\{x} ${y} \\${z} é 'q' : #", "--bf16"]
    with pytest.raises(SystemExit) as ended:
        parse(*words, "--print-config")
    assert ended.value.code == 0
    path = tmp_path / "config.yaml"
    path.write_text(capsys.readouterr().out)
    again = parse("--config", str(path), required=False)
    assert again.to_dict() == parse(*words).to_dict()


def test_a_configuration_is_rebuilt_from_its_plain_form():
    cfg = parse("DATA", "--arch", "toy_deep", "--optimizer", "sgd", "--momentum", "0.5")
    again = config_from_dict(ScalerunConfig, cfg.to_dict(), choosers=CHOOSERS)
    assert again.to_dict() == cfg.to_dict()


def test_a_parsed_configuration_is_read_only():
    cfg = parse()
    with pytest.raises(AttributeError, match="read-only"):
        cfg.common.seed = 3
    with pytest.raises(AttributeError, match="read-only"):
        cfg.common = None


def test_a_switch_named_no_x_is_turned_off_with_a_value_alone(capsys):
    assert parse("--no-save").checkpoint.no_save
    assert not parse("--no-save", "--no-save=false").checkpoint.no_save
    assert "--no-no-save is not a flag; did you mean --no-save" in refusal("--no-no-save")
    with pytest.raises(SystemExit):
        parse("--help")
    assert "--no-no-" not in capsys.readouterr().out


def test_the_version_needs_no_other_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--version", required=False)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("train ")


def test_help_without_a_component_says_what_is_missing(capsys):
    with pytest.raises(SystemExit):
        parse("--help", required=False)
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: train [DATA] [flags]")
    assert text.endswith("Together with --task and --arch, --help lists their flags too.")
    with pytest.raises(SystemExit):
        parse("--help")
    assert "Together with" not in capsys.readouterr().out


@dataclass
class OwnDefaultConfig(ScalerunDataclass):
    bf16: bool = option(False, "compute in bfloat16 (default: as in training)")


def test_help_gives_one_default(capsys):
    with pytest.raises(SystemExit):
        parse_config(OwnDefaultConfig, ["--help"], prog="command")
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: command [flags]")
    assert text.endswith("compute in bfloat16 (default: as in training)")


def test_help_names_every_flag_and_its_default(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        "--batch-size",
        "--max-sentences",
        "--no-save-async",
        "--decoder-layers",
        "--task",
    ):
        assert flag in text
    assert "(default: 0.9,0.98)" in text
