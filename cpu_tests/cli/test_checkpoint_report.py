from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scalerun.checkpoint.atomic import FileRecord
from scalerun.checkpoint.inspection import Finding, Inspection, TensorFacts
from scalerun.checkpoint.manifest import Manifest
from scalerun.cli.checkpoint_report import (
    format_finding,
    format_summary,
    format_tensors,
    to_record,
)
from scalerun.dataclass.errors import UserError

TABLE = "embedding.tokens.weight"


@pytest.fixture
def found(tmp_path):
    """A checkpoint of four processes at the end of an epoch, with a table that is used twice."""
    settings = {
        "_name": "mt_tiny",
        "share_all_embeddings": True,
        "dropout": 0.0,
        "decoder_layers": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model": settings}))
    shapes = {f"encoder.{TABLE}": (1000, 8), f"decoder.{TABLE}": (1000, 8), "scale": ()}
    model = [TensorFacts(n, torch.Size(s), torch.bfloat16) for n, s in shapes.items()]
    manifest = Manifest(
        num_updates=70,
        files={"a": FileRecord(1_000_000, "")},
        version="0.1.0",
        torch_version="2.11.0",
        world_size=4,
        epoch_end=3,
        metric=1.5,
        metric_name="/loss",
    )
    return Inspection(tmp_path, manifest, ["model", "trainer"], {"model": model}, epoch=3)


def test_the_summary_has_a_line_for_each_fact(found):
    assert format_summary(found).splitlines() == [
        str(found.path),
        "update        70",
        "epoch         3, which ended here",
        "metric        loss 1.5",
        "written by    scalerun 0.1.0, torch 2.11.0, 4 processes",
        "size          1,000,000 bytes in 1 file",
        "architecture  mt_tiny",
        "              share_all_embeddings True",
        "              decoder_layers 2",
        "parameters    8,001",
        "",
        "part     tensors  elements   bytes  formats",
        "model          3    16,001  32,002  bfloat16",
        "trainer        -         -       -",
    ]


def test_tensors_are_listed_with_shape_and_format(found):
    assert format_tensors(found, "model").splitlines()[-2:] == [
        "decoder.embedding.tokens.weight  1000 x 8  bfloat16",
        "scale                            scalar    bfloat16",
    ]
    with pytest.raises(UserError, match="no tensors of --part ema; those that have some: model"):
        format_tensors(found, "ema")


def test_the_record_is_json_and_has_tensors_on_demand(found):
    record = json.loads(json.dumps(to_record(found, "model")))
    assert record["tensors"][2] == {"name": "scale", "shape": [], "dtype": "bfloat16"}
    assert record["parts"] == {"model": 3, "trainer": 0}
    assert "tensors" not in to_record(found, None)


def test_a_finding_is_one_line(found):
    path = Path("run/checkpoint_70")
    whole = format_finding(Finding(path, None, found.manifest))
    assert whole == "run/checkpoint_70: whole (1,000,000 bytes in 1 file)"
    damaged = format_finding(Finding(path, "it has no manifest.json"))
    assert damaged == "run/checkpoint_70: DAMAGED: it has no manifest.json"
