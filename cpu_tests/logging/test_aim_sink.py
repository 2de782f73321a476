"""Against a stand-in for the package, which CI does not install."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from scalerun.dataclass.errors import UserError
from scalerun.logging.aim_sink import AimSink


class FakeRun:
    made: list["FakeRun"]

    def __init__(self, **settings: Any) -> None:
        if settings["repo"] == "/nowhere":
            raise PermissionError(13, "Permission denied")
        if settings["run_hash"] == "gone":
            raise FakeMissingRunError("gone")
        self.settings = settings
        self.hash = settings["run_hash"] or "new-hash"
        self.items: dict[str, Any] = {}
        self.points: list[tuple[Any, ...]] = []
        FakeRun.made.append(self)

    def __setitem__(self, key: str, value: Any) -> None:
        self.items[key] = value

    def track(self, value: float, *, name: str, step: int, context: dict[str, str]) -> None:
        self.points.append((value, name, step, context["subset"]))

    def close(self) -> None:
        self.points.append(("closed",))


class FakeMissingRunError(RuntimeError):
    pass


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    FakeRun.made = []
    module = types.ModuleType("aim")
    module.Run = FakeRun  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aim", module)
    return FakeRun.made


def test_sets_share_names_and_differ_in_their_context(tmp_path: Path, runs: list[FakeRun]) -> None:
    with AimSink("repo", save_dir=tmp_path / "run", run_config={"seed": 1}) as sink:
        sink.write({"kind": "train", "num_updates": 5, "loss": 2, "note": "x"})
        sink.write({"kind": "valid", "subset": "plays", "num_updates": 5, "loss": 3.0})
        sink.write({"kind": "event", "event": "saved", "num_updates": 5, "bytes": 9})
    assert runs[0].points == [(2.0, "loss", 5, "train"), (3.0, "loss", 5, "plays"), ("closed",)]
    assert runs[0].items == {"config": {"seed": 1}}


def test_a_restart_continues_the_run_of_the_folder(tmp_path: Path, runs: list[FakeRun]) -> None:
    for _ in range(2):
        AimSink("repo", save_dir=tmp_path, run_config={}).close()
    assert [run.settings["run_hash"] for run in runs] == [None, "new-hash"]


def test_a_repository_that_cannot_be_used_is_named(tmp_path: Path, runs: list[FakeRun]) -> None:
    with pytest.raises(UserError, match=r"--aim-repo /nowhere cannot be used: .*Permission denied"):
        AimSink("/nowhere", save_dir=tmp_path, run_config={})


def test_a_run_that_is_gone_says_what_to_remove(tmp_path: Path, runs: list[FakeRun]) -> None:
    (tmp_path / "aim_run_hash").write_text("gone\n")
    with pytest.raises(UserError, match=r"--aim-repo repo: gone; remove .*aim_run_hash to start"):
        AimSink("repo", save_dir=tmp_path, run_config={})
