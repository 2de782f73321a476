import json
import shutil
import threading
from pathlib import Path

import pytest

from scalerun.dataclass.configs import CommonConfig
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.logging.base_sink import BaseSink
from scalerun.logging.console import JsonSink, TextSink
from scalerun.logging.progress_bar import TimeLeft, TqdmSink
from scalerun.logging.records import Record
from scalerun.logging.sinks import JsonlSink, SinkGroup, build_sinks

LINE = b'{"kind": "train", "num_updates": 1}\n'


class Memory(BaseSink):
    def __init__(self) -> None:
        self.seen: list[object] = []

    def write(self, record: Record) -> None:
        self.seen.append(record)

    def advance(self, num_updates: int) -> None:
        self.seen.append(num_updates)

    def close(self) -> None:
        self.seen.append("closed")


def write_one(path: Path) -> None:
    with JsonlSink(path) as sink:
        sink.write({"kind": "train", "num_updates": 1})


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (b"", b""),
        (LINE, LINE),
        (LINE + b'{"kind": "tr', LINE),
        (b'{"kind": "tr', b""),
        (LINE + LINE[:-1], LINE + LINE),
        (LINE + b"\xff\x00" * 70_000, LINE),
        (LINE + b"3", LINE),
    ],
)
def test_a_torn_last_line_is_healed_and_whole_ones_stay(
    tmp_path: Path, before: bytes, kept: bytes
) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_bytes(before)
    write_one(path)
    assert path.read_bytes() == kept + LINE


def test_a_file_that_is_deleted_is_made_again_and_its_folder_is_not(tmp_path: Path) -> None:
    path = tmp_path / "run/metrics.jsonl"
    with JsonlSink(path) as sink:
        sink.write({"kind": "train", "num_updates": 0})
        path.unlink()
        sink.write({"kind": "train", "num_updates": 1})
        assert path.read_bytes() == LINE
        shutil.rmtree(path.parent)
        with pytest.raises(UserError, match="run is gone: it was deleted or moved during the run"):
            sink.write({"kind": "train", "num_updates": 2})


def test_every_cut_of_a_file_heals_to_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "m"
    whole = LINE * 2
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        write_one(path)
        assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_a_record_is_in_the_file_before_anything_is_closed(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m")
    sink.write({"kind": "train", "loss": float("nan")})
    assert json.loads((tmp_path / "m").read_text()) == {"kind": "train", "loss": None}
    sink.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be written: "):
        JsonlSink(tmp_path / "file" / "metrics.jsonl")


def test_a_full_disk_is_an_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    sink = JsonlSink(Path("/dev/full"))
    with pytest.raises(UserError, match="/dev/full cannot be written: No space left on device"):
        sink.write({"kind": "train"})


def test_a_group_hands_on_everything_and_closes_all_even_when_one_fails() -> None:
    class Broken(Memory):
        def close(self) -> None:
            raise UserError("cannot close")

    first, last = Memory(), Memory()
    group = SinkGroup([first, Broken(), last])
    group.write({"kind": "event"})
    group.advance(3)
    with pytest.raises(UserError, match="cannot close"):
        group.close()
    assert first.seen == last.seen == [{"kind": "event"}, 3, "closed"]
    group.close()


def test_threads_write_whole_records(tmp_path: Path) -> None:
    with SinkGroup([JsonlSink(tmp_path / "m")]) as group:
        threads = [
            threading.Thread(target=lambda i=i: [group.write({"x": i}) for _ in range(100)])
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = (tmp_path / "m").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 400


def build(tmp_path: Path, *, rank: int = 0, **settings: object) -> SinkGroup:
    return build_sinks(
        CommonConfig(**settings),  # type: ignore[arg-type]
        save_dir=tmp_path / "run",
        run_config={},
        rank=rank,
        max_update=10,
    )


@pytest.mark.parametrize(
    ("log_format", "shown"),
    [
        ("auto", []),
        ("simple", []),
        ("none", []),
        ("json", [JsonSink]),
        ("tqdm", [TqdmSink]),
    ],
)
def test_the_file_is_written_in_every_format(
    tmp_path: Path, log_format: str, shown: list[type[BaseSink]]
) -> None:
    with build(tmp_path, log_format=log_format) as group:
        group.write({"kind": "train", "num_updates": 3})
        kinds = [type(sink) for sink in group.sinks]
    assert kinds == [JsonlSink, TimeLeft, TextSink, *shown]
    assert (tmp_path / "run/metrics.jsonl").read_text().count("\n") == 1


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with build(tmp_path, rank=1) as group:
        group.write({"kind": "train"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "package"),
    [({"wandb_project": "p"}, "wandb"), ({"aim_repo": "r"}, "aim")],
)
def test_a_tracker_that_is_not_installed_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], package: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    flag = "--" + next(iter(settings)).replace("_", "-")
    with pytest.raises(ConfigError, match=rf"{flag} needs .* pip install {package}"):
        build(tmp_path, **settings)
