"""``make quickstart`` keeps its promises."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BZIP2 = {"valid/plays": 2.72, "valid/novels": 2.41}
"""Bits per byte of ``bzip2 -9``."""


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_quick_start_beats_bzip2_and_says_that_it_is_finished(tmp_path):
    """With room in time for a busy machine; the user's own run stays as it is."""
    command = ["make", "quickstart", f"RUN={tmp_path / 'run'}", "FLAGS=--stop-time-hours 0.3"]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    found = json.loads((tmp_path / "run/valid.json").read_text())
    for subset, limit in BZIP2.items():
        assert found[subset]["bits_per_byte"] < limit
    for row in ("this model", "bzip2 -9", "order 5"):
        assert row in first.stdout
    saved = {path.name for path in (tmp_path / "run").glob("checkpoint_*")}
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "400 updates are done" in again.stderr
    assert {path.name for path in (tmp_path / "run").glob("checkpoint_*")} == saved
