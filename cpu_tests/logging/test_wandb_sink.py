"""Against a stand-in for the package, which CI does not install."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from scalerun.dataclass.errors import UserError
from scalerun.logging.wandb_sink import WandbSink


class FakeRun:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.id = settings["id"] or "new-id"
        self.calls: list[tuple[Any, ...]] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append(("define", name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.calls.append(("log", values))

    def finish(self) -> None:
        self.calls.append(("finish",))


class FakeError(Exception):
    pass


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    made: list[FakeRun] = []

    def init(**settings: Any) -> FakeRun:
        if settings["project"] == "refused":
            raise FakeError("no API key configured")
        made.append(FakeRun(**settings))
        return made[-1]

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    module.errors = types.SimpleNamespace(Error=FakeError)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


def test_curves_are_drawn_against_updates(tmp_path: Path, runs: list[FakeRun]) -> None:
    with WandbSink("p", save_dir=tmp_path / "run", run_config={"seed": 1}) as sink:
        sink.write({"kind": "train", "num_updates": 5, "loss": 2.0, "note": "x"})
        sink.write({"kind": "event", "event": "saved", "num_updates": 5})
    assert runs[0].calls == [
        ("define", "num_updates", None),
        ("define", "*", "num_updates"),
        ("log", {"train/loss": 2.0, "num_updates": 5}),
        ("finish",),
    ]
    assert runs[0].settings["name"] == "run"
    assert runs[0].settings["config"] == {"seed": 1}


def test_a_restart_continues_the_run_of_the_folder(tmp_path: Path, runs: list[FakeRun]) -> None:
    for _ in range(2):
        WandbSink("p", save_dir=tmp_path, run_config={}).close()
    assert [run.settings["id"] for run in runs] == [None, "new-id"]
    assert [run.settings["resume"] for run in runs] == [None, "allow"]


def test_a_refusal_is_one_sentence(tmp_path: Path, runs: list[FakeRun]) -> None:
    with pytest.raises(
        UserError, match="--wandb-project refused: no API key configured; run `wandb login` or"
    ):
        WandbSink("refused", save_dir=tmp_path, run_config={})


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, runs: list[FakeRun]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="wandb_run_id cannot be written"):
        WandbSink("p", save_dir=tmp_path / "file", run_config={})
