import os
import pty

import pytest

from scalerun.logging.progress_bar import TimeLeft, TqdmSink, show_seconds
from scalerun.logging.records import Record


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


RECORD: Record = {
    "kind": "train",
    "num_updates": 3,
    "loss": 4.5678,
    "bits_per_byte": 2.3456,
    "wps": 12345.6,
    "train_wall": 30.0,
}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0:00"), (7.4, "0:07"), (187, "3:07"), (7387, "2:03:07"), (352987, "4d 02:03:07")],
)
def test_seconds_are_shown_as_a_clock(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


def test_time_left_follows_the_rate_since_the_start_of_this_process() -> None:
    clock = Clock()
    left = TimeLeft(max_update=110, clock=clock)
    assert left.seconds() is None
    left.advance(101)
    assert left.seconds() is None
    clock.now += 6
    left.advance(104)
    assert left.seconds() == 12


def test_the_limit_that_comes_first_counts() -> None:
    clock = Clock()
    left = TimeLeft(max_update=1000, stop_seconds=40, clock=clock)
    left.advance(1)
    clock.now += 10
    left.advance(2)
    assert left.seconds() == 9980
    left.write(RECORD)
    assert left.seconds() == 10
    clock.now += 4
    assert left.seconds() == 6
    clock.now += 40
    assert left.seconds() == 0


def test_without_a_limit_nobody_can_tell() -> None:
    left = TimeLeft()
    left.advance(1)
    left.advance(9)
    left.write(RECORD)
    assert left.seconds() is None


def bar_text(sink: TqdmSink, capsys: pytest.CaptureFixture[str]) -> str:
    sink.close()
    out, err = capsys.readouterr()
    assert out == ""
    return err.split("\r")[-1].rstrip()


def test_the_bar_shows_loss_bits_per_byte_speed_and_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    left = TimeLeft(max_update=4, clock=clock)
    sink = TqdmSink(left)
    for update in (1, 2, 3):
        left.advance(update)
        sink.advance(update)
        clock.now += 60
    sink.write(RECORD)
    text = bar_text(sink, capsys)
    assert text.lstrip().startswith("75%|")
    assert text.endswith("| 3/4, loss 4.568 bits/byte 2.346 tokens/s 12,346 left 1:30")


def test_a_restarted_bar_starts_where_the_run_stands(capsys: pytest.CaptureFixture[str]) -> None:
    sink = TqdmSink(TimeLeft(max_update=200))
    sink.advance(100)
    assert "| 100/200" in bar_text(sink, capsys)


def test_without_a_known_end_the_bar_counts(capsys: pytest.CaptureFixture[str]) -> None:
    sink = TqdmSink(TimeLeft())
    sink.advance(1)
    sink.write({"kind": "train", "num_updates": 2, "loss": 1.0})
    assert bar_text(sink, capsys) == "2 updates, loss 1.000"


def test_a_terminal_that_reports_no_size_shows_a_bar() -> None:
    """Those of containers and remote shells do."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stderr, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", stderr)
        assert min(os.get_terminal_size(stderr.fileno())) == 0
        sink = TqdmSink(TimeLeft(max_update=4))
        sink.advance(2)
        sink.close()
        assert b"/4" in os.read(ours, 10_000)
    os.close(ours)


def test_what_is_no_training_record_leaves_the_bar_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sink = TqdmSink(TimeLeft(max_update=4))
    sink.write({"kind": "valid", "num_updates": 1})
    sink.close()
    assert capsys.readouterr() == ("", "")
