"""Training on a GPU: the same numbers as on a CPU, and half precision that learns."""

import json
from pathlib import Path

import pytest
import torch

from scalerun.cli import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ROOT = Path(__file__).parents[1]
WORDS = [
    str(ROOT / "projects/quickstart/data"), "--task", "streaming_language_modeling",
    "--tokenizer", "bytes", "--tokens-per-sample", "128", "--arch", "lm_tiny", "--batch-size", "8",
    "--lr", "1e-3", "--max-update", "30", "--log-interval", "1", "--no-save",
    "--max-valid-steps", "4", "--log-format", "none",
]  # fmt: skip


def losses(save_dir, *words):
    assert train.main([*WORDS, "--save-dir", str(save_dir), *words]) == 0
    lines = (save_dir / "metrics.jsonl").read_text().splitlines()
    return [r["loss"] for r in map(json.loads, lines) if r["kind"] == "train"]


def test_a_gpu_gives_the_numbers_of_a_cpu_in_float32(tmp_path):
    words = ["--dropout", "0"]
    on_cpu, on_gpu = losses(tmp_path / "cpu", "--cpu", *words), losses(tmp_path / "gpu", *words)
    assert on_gpu[0] == pytest.approx(on_cpu[0], rel=1e-5)
    assert on_gpu == pytest.approx(on_cpu, rel=1e-2)


@pytest.mark.parametrize("precision", ["--fp16", "--bf16"])
def test_half_precision_learns_as_float32_does(tmp_path, precision):
    half = losses(tmp_path / "half", precision)
    full = losses(tmp_path / "full")
    assert half[-1] == pytest.approx(full[-1], rel=0.05)
    assert half[-1] < half[0] - 1
