import json

import pytest

from scalerun.data.text.jsonl_dataset import QuarantinedRecord
from scalerun.data.text.quarantine import QuarantineFile
from scalerun.dataclass.errors import UserError

RECORDS = [QuarantinedRecord("a.jsonl", i, "not JSON", "{") for i in (3, 8)]


def test_a_record_is_listed_once_however_often_it_is_met(tmp_path):
    path = tmp_path / "run" / "quarantine.jsonl"
    for _ in range(2):  # two starts of a run
        quarantine = QuarantineFile(path)
        quarantine.add(RECORDS[:1])
        quarantine.add(RECORDS)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["file"], line["line"], line["reason"]) for line in lines] == [
        ("a.jsonl", 3, "not JSON"), ("a.jsonl", 8, "not JSON"),
    ]  # fmt: skip


def test_without_bad_records_there_is_no_file(tmp_path):
    QuarantineFile(tmp_path / "q.jsonl").add([])
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_line_does_not_matter(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"file": "a.js')
    QuarantineFile(path).add(RECORDS)
    assert path.read_text().count("not JSON") == 2


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"q\.jsonl cannot be written"):
        QuarantineFile(tmp_path / "file" / "q.jsonl").add(RECORDS)
