"""The recipe of a thousand layers is what its page says, and runs when it is made small."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml

from scalerun.models.transformer_config import TransformerConfig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "projects/deepnorm_1000"
DATA = ROOT / "projects/quickstart/data"
NAMES = ["deepnorm", "post_norm"]


@pytest.fixture
def command(run):
    """A run of one of the two configurations; the plug-in stays in its process."""

    def command(name, *words):
        config = ["--config", FOLDER / f"{name}.yaml", "--user-dir", FOLDER]
        done = run("train", DATA, *config, *words)
        assert done.code == 0, done.stderr
        return done

    return command


def test_both_files_have_a_thousand_layers_and_differ_in_their_residuals_alone(command):
    printed = [yaml.safe_load(command(name, "--print-config").stdout) for name in NAMES]
    deep, post = (each.pop("model") for each in printed)
    assert printed[0] == printed[1]
    assert {name for name in deep if deep[name] != post[name]} == {
        "deepnorm",
        "decoder_normalize_before",
    }
    for settings, residual in ((deep, "deep_norm"), (post, "post_norm")):
        assert settings.pop("_name") == "plain_norm_lm"
        cfg = TransformerConfig(**settings)
        assert cfg.axes().residual == residual
        assert (cfg.decoder_layers, cfg.decoder_embed_dim) == (1000, 32)


@pytest.mark.parametrize("name", NAMES)
def test_a_shallow_version_trains(command, records, tmp_path, name):
    small = ["--decoder-layers", "3", "--max-update", "8", "--cache-dir", "cache"]
    command(name, *small, "--save-dir", "run")
    losses = [record["bits_per_byte"] for record in records(tmp_path / "run", "train")]
    assert len(losses) == 8
    assert losses[-1] < losses[0] < 10


def draw(folder, *pairs):
    command = [sys.executable, FOLDER / "curve.py", "out.svg", *pairs]
    subprocess.run(command, cwd=folder, check=True)
    return ET.parse(folder / "out.svg").getroot()


def test_the_curve_has_a_point_for_each_finite_loss_and_ends_at_the_first_other_one(tmp_path):
    for name, losses in (("a", [8.0, 4.5, 4.0]), ("b", [8.0, 7.0, None, 6.0])):
        (tmp_path / name).mkdir()
        lines = [{"kind": "event", "event": "data", "num_updates": 0}] + [
            {"kind": "train", "num_updates": i, "bits_per_byte": loss}
            for i, loss in enumerate(losses, 1)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    svg = draw(tmp_path, "one=a", "two=b", "level=4.7")
    lines = [element.get("points").split() for element in svg if element.tag.endswith("polyline")]
    assert [len(points) for points in lines] == [3, 2]
    heights = [float(point.split(",")[1]) for point in lines[0]]
    assert heights == sorted(heights)  # less loss is further down
    words = [element.text for element in svg if element.tag.endswith("text")]
    assert {"one", "two", "level"} <= set(words)


def test_the_curve_of_the_page_is_a_picture_of_fifty_updates():
    svg = ET.parse(FOLDER / "deepnorm_1000.svg").getroot()
    lines = [element.get("points").split() for element in svg if element.tag.endswith("polyline")]
    assert [len(points) for points in lines] == [50, 50]
