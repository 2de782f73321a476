import json
from pathlib import Path

import pytest
import torch

from scalerun.dataclass.errors import UserError
from scalerun.logging.profiler import UpdateProfiler

CPU = torch.device("cpu")


def work(profiler: UpdateProfiler, updates: range) -> None:
    for update in updates:
        with profiler.record(update):
            torch.ones(4, 4) @ torch.ones(4, 4)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("profile/*"))


def test_the_range_and_nothing_else_is_recorded(tmp_path: Path) -> None:
    with UpdateProfiler(tmp_path, (2, 3), device=CPU) as profiler:
        work(profiler, range(1, 6))
    assert names(tmp_path) == ["operators_2-3.txt", "trace_2-3.json"]
    events = json.loads((tmp_path / "profile/trace_2-3.json").read_text())["traceEvents"]
    found = {event["name"] for event in events if event["name"].startswith("update ")}
    assert found == {"update 2", "update 3"}
    assert "aten::mm" in (tmp_path / "profile/operators_2-3.txt").read_text()


def test_off_records_nothing(tmp_path: Path) -> None:
    with UpdateProfiler(tmp_path, None, device=CPU) as profiler:
        work(profiler, range(1, 4))
    assert names(tmp_path) == []


def test_an_early_end_keeps_the_finished_updates(tmp_path: Path) -> None:
    def fail(profiler: UpdateProfiler) -> None:
        with profiler:
            work(profiler, range(2, 3))
            with profiler.record(3):
                raise KeyError

    with pytest.raises(KeyError):
        fail(UpdateProfiler(tmp_path, (2, 9), device=CPU, rank=1))
    assert names(tmp_path) == ["operators_2-2.rank1.txt", "trace_2-2.rank1.json"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("")
    profiler = UpdateProfiler(tmp_path, (1, 1), device=CPU)
    with pytest.raises(UserError, match="profile cannot be written"):
        work(profiler, range(1, 2))
