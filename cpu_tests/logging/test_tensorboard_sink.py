import sys
from pathlib import Path

import pytest

from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.logging.records import Record
from scalerun.logging.tensorboard_sink import TensorBoardSink, scalars_of

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def train(num_updates: int, loss: float) -> Record:
    return {"kind": "train", "num_updates": num_updates, "loss": loss}


def event(name: str, num_updates: int) -> Record:
    return {"kind": "event", "event": name, "num_updates": num_updates}


def curve(logdir: Path, tag: str = "train/loss") -> dict[int, float]:
    events = accumulator.EventAccumulator(str(logdir))
    events.Reload()
    return {point.step: point.value for point in events.Scalars(tag)}


def write(logdir: Path, *records: Record) -> None:
    with TensorBoardSink(logdir) as sink:
        for record in records:
            sink.write(record)


def test_numbers_are_named_by_their_set() -> None:
    record: Record = {"kind": "valid", "subset": "a/b", "num_updates": 3, "loss": 1, "ppl": None}
    assert scalars_of(record) == {"a/b/loss": 1.0}
    assert scalars_of(train(1, 2.0)) == {"train/loss": 2.0}
    assert scalars_of(event("saved", 1)) == {}


def test_a_restart_continues_the_curve_in_the_same_folder(tmp_path: Path) -> None:
    write(tmp_path, event("data", 0), train(1, 1.0), train(2, 2.0), train(3, 3.0))
    write(tmp_path, event("data", 0), event("resumed", 2), train(3, 30.0), train(4, 40.0))
    assert curve(tmp_path) == {1: 1.0, 2: 2.0, 3: 30.0, 4: 40.0}


def test_a_restart_without_an_event_keeps_what_came_before_its_first_record(
    tmp_path: Path,
) -> None:
    write(tmp_path, train(1, 1.0), train(2, 2.0))
    write(tmp_path, train(2, 20.0))
    assert curve(tmp_path) == {1: 1.0, 2: 20.0}


def test_a_point_is_on_disk_before_the_end(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(train(1, 1.0))
    assert curve(tmp_path) == {1: 1.0}
    sink.close()


def test_a_missing_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"--tensorboard-logdir needs .* pip install tensorboard"):
        TensorBoardSink(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--tensorboard-logdir .*file cannot be written"):
        TensorBoardSink(tmp_path / "file")
