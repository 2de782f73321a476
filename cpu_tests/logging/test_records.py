import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerun.dataclass.errors import UserError
from scalerun.logging.records import describe_record, encode_record, read_records


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_finite_number_survives_to_the_bit(number: float) -> None:
    assert json.loads(encode_record({"x": number}))["x"] == number


def test_numbers_that_are_not_finite_become_null_at_any_depth() -> None:
    record = {"a": math.nan, "b": [math.inf, 1.0], "c": {"d": -math.inf}, "e": 2}
    assert json.loads(encode_record(record)) == {
        "a": None,
        "b": [None, 1.0],
        "c": {"d": None},
        "e": 2,
    }


def test_a_record_is_one_line_for_every_reader() -> None:
    text = "a\nb\u2028c\u0085d\ud800"
    line = encode_record({"kind": "event", "text": text})
    assert len(line.splitlines()) == 1
    assert json.loads(line)["text"] == text


def test_what_is_not_json_is_refused() -> None:
    with pytest.raises(TypeError):
        encode_record({"x": object()})  # type: ignore[dict-item]


def write_lines(path: Path, *records: dict[str, object], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path


def train(num_updates: int) -> dict[str, object]:
    return {"kind": "train", "num_updates": num_updates}


def resumed(num_updates: int) -> dict[str, object]:
    return {"kind": "event", "event": "resumed", "num_updates": num_updates}


def test_reading_keeps_what_the_restart_kept_and_replaces_the_rest(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "m", train(1), train(2), train(3), resumed(2), train(3), tail='{"torn'
    )
    assert read_records(path) == [train(1), train(2), resumed(2), train(3)]
    assert len(read_records(path, current=False)) == 5


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"kind": "train"}\n[1]\n')
    with pytest.raises(UserError, match=r"m:2: not a JSON object; remove the line"):
        read_records(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing cannot be read: No such file"):
        read_records(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (
            {"kind": "train", "num_updates": 7, "wps": 12345.6, "loss": 1.23456, "epoch": 1},
            "train | epoch 1 | update 7 | loss 1.235 | tokens/s 12,346",
        ),
        (
            {"kind": "valid", "subset": "plays", "num_updates": 7, "tokens": 54321, "loss": 2.0},
            "plays | update 7 | loss 2 | tokens 54,321",
        ),
        (
            {"kind": "event", "event": "saved", "num_updates": 7, "checkpoint": "c", "ok": True},
            "saved | update 7 | checkpoint c | ok True",
        ),
        (
            {
                "kind": "event",
                "event": "data",
                "num_updates": 0,
                "subset": "plays",
                "shards": 2,
                "shards_read": 1,
                "corpora": ["a", "b"],
                "num_corpora": 2,
                "documents": 3,
                "lines": 4,
                "lines_blank": 1,
                "lines_quarantined": 0,
                "fingerprint": "01-02",
            },
            "data | update 0 | subset plays | shards 2 | shards_read 1 | documents 3",
        ),
        (
            {"kind": "event", "event": "data", "subset": "plays", "lines_quarantined": 2},
            "data | subset plays | lines_quarantined 2",
        ),
        (
            {"kind": "train", "loss_scale": 1.0, "gnorm": 0.5, "clip": 0.0, "tokens_seen": 9},
            "train | gnorm 0.5",
        ),
        ({"kind": "train", "loss_scale": 64.0, "extra": 3}, "train | loss_scale 64 | extra 3"),
        ({"kind": "train", "ppl": 1e30, "loss": math.nan}, f"train | loss nan | ppl {1e30:,.0f}"),
    ],
)
def test_people_read_rounded_numbers(record: dict[str, object], text: str) -> None:
    assert describe_record(record) == text  # type: ignore[arg-type]


def test_averages_of_vectors_are_kept_but_not_shown() -> None:
    record = {"kind": "train", "num_updates": 3, "expert_load": [[0.5, 0.5]], "gnorm": 1.0}
    assert "expert_load" not in describe_record(record)
    assert json.loads(encode_record(record))["expert_load"] == [[0.5, 0.5]]
