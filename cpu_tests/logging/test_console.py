import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalerun.dataclass.errors import UserError
from scalerun.logging.console import (
    ConsoleHandler,
    JsonSink,
    TextSink,
    close_logging,
    resolve_log_format,
    setup_logging,
)
from scalerun.logging.progress_bar import TimeLeft, TqdmSink

logger = logging.getLogger("scalerun.something")
TRAIN = {"kind": "train", "num_updates": 2, "loss": 1.5}
VALID = {"kind": "valid", "subset": "plays", "num_updates": 2, "loss": 1.5}
EVENT = {"kind": "event", "event": "saved", "num_updates": 2}
SKIPPED = {"kind": "event", "event": "skipped", "num_updates": 2}


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    ours = logging.getLogger("scalerun")
    level = ours.level
    yield
    close_logging()
    ours.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_auto_is_a_bar_on_a_terminal_and_lines_elsewhere() -> None:
    assert resolve_log_format("auto", Terminal()) == "tqdm"
    assert resolve_log_format("auto", io.StringIO()) == "simple"
    assert resolve_log_format("json", Terminal()) == "json"


@pytest.mark.parametrize(
    ("log_format", "expected"),
    [
        ("simple", ["hello", "train", "plays", "saved", "skipped"]),
        ("tqdm", ["hello", "plays", "saved", "skipped"]),
        ("json", ["hello", "skipped"]),
        ("none", ["skipped"]),
    ],
)
def test_the_terminal_shows_each_thing_once_and_the_file_everything(
    log_format: str, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "logs" / "run.log"
    setup_logging(log_format, log_file=str(path))
    logger.info("hello")
    sink = TextSink(TimeLeft())
    for record in (TRAIN, VALID, EVENT, SKIPPED):
        sink.write(record)  # type: ignore[arg-type]
    close_logging()
    out, err = capsys.readouterr()
    words = [re.split(r" \| ", line)[2] for line in err.splitlines()]
    assert (out, words) == ("", expected)
    lines = path.read_text().splitlines()
    assert [re.split(r" \| ", line)[2] for line in lines] == [
        "hello",
        "train",
        "plays",
        "saved",
        "skipped",
    ]


def test_json_lines_are_all_of_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("json")
    logger.info("hello")
    JsonSink().write({"kind": "train", "loss": 0.1})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"kind": "train", "loss": 0.1}
    assert out.endswith("}\n")
    assert "hello" in err


def test_a_line_of_text_tells_the_time_left(caplog: pytest.LogCaptureFixture) -> None:
    clock = iter([0.0, 0.0, 10.0, 10.0]).__next__
    left = TimeLeft(max_update=10, clock=clock)
    left.advance(1)
    left.advance(2)
    caplog.set_level(logging.INFO, "scalerun")
    TextSink(left).write(TRAIN)  # type: ignore[arg-type]
    assert caplog.messages == ["train | update 2 | loss 1.5 | left 0:00"]


def test_messages_do_not_tear_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("tqdm")
    bar = TqdmSink(TimeLeft(max_update=9))
    bar.advance(1)
    logger.info("hello")
    bar.close()
    err = capsys.readouterr().err
    message = re.search(r"[^\r\n]*hello[^\r\n]*", err)
    assert message is not None
    assert "%" not in message[0]


def test_ranks_are_named_and_only_the_first_is_talkative(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("simple", rank=3, world_size=4, log_file=str(tmp_path / "log"))
    logger.info("hello")
    logger.warning("trouble")
    assert re.fullmatch(r"\S+ \S+ \| WARNING \| \[rank 3\] trouble\n", capsys.readouterr().err)
    assert not (tmp_path / "log").exists()


def test_setting_up_twice_shows_a_message_once(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    setup_logging()
    logger.info("hello")
    assert capsys.readouterr().err.count("hello") == 1
    assert sum(isinstance(h, ConsoleHandler) for h in logging.getLogger().handlers) == 1


def test_other_libraries_stay_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    logging.getLogger("other").info("chatter")
    assert capsys.readouterr().err == ""


def test_the_log_file_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for text in ("one", "two"):
        setup_logging("none", log_file=str(path))
        logger.info(text)
        close_logging()
    assert [line[-3:] for line in path.read_text().splitlines()] == ["one", "two"]


def test_a_log_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--log-file .* cannot be written: Is a directory"):
        setup_logging(log_file=str(tmp_path))
