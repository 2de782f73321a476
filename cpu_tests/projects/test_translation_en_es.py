"""The recipe for translation does what its page says, and learns in three minutes."""

import json
import re
import shlex
from pathlib import Path

import pytest
import sacrebleu
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "projects/translation_en_es"
DATA = FOLDER / "data"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
CONFIG = yaml.safe_load((FOLDER / "config.yaml").read_text(encoding="utf-8"))
LENGTH = ["--max-len-a", "1.5", "--max-len-b", "10"]
"""What has learned little may not find an end."""
FLOOR = 5.0
"""BLEU of the test set; the logbook has what was measured."""


def commands():
    """What the first block of the page gives to scalerun: name -> words."""
    block, _ = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    found = {}
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        assert words[:2] == ["python", "-m"]
        found[words[2].removeprefix("scalerun.cli.")] = words[3:]
    return found


def lines_of(name):
    return (DATA / name).read_text(encoding="utf-8").splitlines()


def test_the_page_trains_the_configuration_of_the_folder(run):
    asked = run("train", *commands()["train"], "--print-config", cwd=ROOT)
    assert asked.code == 0, asked.stderr
    printed = yaml.safe_load(asked.stdout)
    for section, settings in CONFIG.items():
        assert settings.items() <= printed[section].items()


def test_the_commands_of_the_page_go_together():
    page = commands()
    [model] = [word for word in page["train_tokenizer"] if word.endswith(".model")]
    assert model == CONFIG["task"]["tokenizer"]
    run_folder = page["train"][page["train"].index("--save-dir") + 1]
    assert page["generate"][page["generate"].index("--path") + 1] == run_folder


def test_the_peer_has_the_size_and_the_batches_of_the_configuration():
    text = (FOLDER / "marian.py").read_text(encoding="utf-8")
    defaults = dict(re.findall(r'"--([\w-]+)", type=\w+, default=([\w.-]+)\)', text))
    model = CONFIG["model"]
    for side in ("encoder", "decoder"):
        assert model[f"{side}_embed_dim"] == int(defaults["dim"])
        assert model[f"{side}_ffn_embed_dim"] == int(defaults["ffn"])
        assert model[f"{side}_layers"] == int(defaults["layers"])
        assert model[f"{side}_attention_heads"] == int(defaults["heads"])
    assert model["dropout"] == float(defaults["dropout"])
    assert CONFIG["dataset"]["max_tokens"] == int(defaults["max-tokens"])
    assert CONFIG["criterion"]["label_smoothing"] == float(defaults["label-smoothing"])


@pytest.fixture(scope="module")
def translations(launch, tmp_path_factory):
    """What the short run makes of the test set, and the folder it is in."""
    home = tmp_path_factory.mktemp("short")
    page = commands()

    def run(name, *words):
        one_core = {"OMP_NUM_THREADS": "1"}
        command = launch(home, name, *words, cwd=ROOT, env=one_core)
        assert command.wait(timeout=1200) == 0, command.stderr

    data, tokenizer = page["train_tokenizer"][0], home / "en_es.model"
    run("train_tokenizer", *page["train_tokenizer"], "--output", tokenizer)
    short = ["--config", FOLDER / "short.yaml", "--tokenizer", tokenizer]
    run("train", data, "--config", FOLDER / "config.yaml", *short, "--save-dir", home / "run")
    places = ["--output", home / "test.es", "--scores", home / "test.json"]
    run("generate", "--path", home / "run", "--cpu", "--beam", "1", *LENGTH, *places)
    found = (home / "test.es").read_text(encoding="utf-8").splitlines()
    return found, json.loads((home / "test.json").read_text())


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_short_run_translates_what_it_reads(translations):
    """Better than the floor; the source itself, and translations of other verses, are far below."""
    found, scores = translations
    references, sources = lines_of("test.es"), lines_of("test.en")
    assert scores["sentences"] == len(references) == len(found)
    assert scores["bleu"] > FLOOR

    def bleu(hypotheses):
        return sacrebleu.corpus_bleu(hypotheses, [references]).score

    assert scores["bleu"] == pytest.approx(bleu(found))
    assert bleu(sources) < FLOOR / 4
    assert bleu([*found[100:], *found[:100]]) < FLOOR / 4
