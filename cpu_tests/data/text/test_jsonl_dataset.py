import gzip
import json

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerun.data.text.jsonl_dataset import BadRecord, JsonlDataset, parse_record
from scalerun.data.text.layout import TextFile
from scalerun.data.text.part import Part
from scalerun.dataclass.errors import UserError

BAD = {
    b'{"text": "cut': "not JSON: Unterminated string",
    b"{'text': 1}": "not JSON: Expecting property name",
    b'{"text": "\xff"}': "not UTF-8: byte 0xFF at byte 11",
    b"\x89PNG\x00\x1a": "not UTF-8: byte 0x89 at byte 1 (the file is not text",
    b'{"text": null}': "the value of 'text' is null instead of a string",
    b'{"text": 5}': "is a number instead",
    b'{"text": true}': "is true instead",
    b'{"text": ["a"]}': "is a list instead",
    b'{"text": {"a": 1}}': "is an object instead",
    b'{"src": "a", "tgt": "b"}': "no key 'text' (keys: 'src', 'tgt')",
    b"{}": "no key 'text' (keys: none)",
    b"[1]": "a list instead of a JSON object",
    b'"text"': "a string instead of a JSON object",
    b"null": "null instead of a JSON object",
    b'{"text": "a", "text": "b"}': "the key 'text' appears twice",
    b'{"a": 1, "a": 2, "text": "b"}': "the key 'a' appears twice",
    b'{"text": "\\ud800"}': "half a surrogate pair at character 1",
    b'{"text": "a\tb"}': "not JSON: Invalid control character",
    b"[" * 100_000: "nested too deeply",
    b'{"text": ' + b"9" * 5000 + b"}": "not JSON",
    b'{"text": "a"} {"text": "b"}': "not JSON: Extra data",
}


def test_the_parts_of_a_text_add_up_to_it(text_file):
    file = text_file(b"".join(b'{"text": "document %d"}\n' % i for i in range(50)) + b"\n")
    kept, held_out = (JsonlDataset(file, part=Part(0.3, held_out=side)) for side in (False, True))
    texts = [list(kept), list(held_out)]
    assert all(texts)
    assert sorted(texts[0] + texts[1]) == sorted(JsonlDataset(file))
    assert kept.counts.other_part == held_out.counts.documents == len(texts[1])
    for counts in (kept.counts, held_out.counts):
        assert counts.lines == 51 == counts.blank + counts.other_part + counts.documents


@pytest.mark.parametrize(("line", "reason"), BAD.items(), ids=range(len(BAD)))
def test_a_bad_record_is_refused_with_file_line_and_reason(text_file, line, reason):
    file = text_file(b'{"text": "good"}\n\n' + line + b"\n")
    dataset = iter(JsonlDataset(file))
    assert next(dataset) == "good"
    with pytest.raises(UserError) as caught:
        next(dataset)
    message = str(caught.value)
    assert message.startswith(f"{file.path}:3: ")
    assert reason in message
    assert "--bad-records skip" in message
    assert "\n" not in message


def test_skipped_records_are_counted_and_handed_over(text_file):
    lines = [b'{"text": "good"}', *BAD, b'{"text": "end"}']
    quarantined = []
    dataset = JsonlDataset(text_file(b"\n".join(lines)), quarantined.append)
    assert list(dataset) == ["good", "end"]
    assert dataset.counts.quarantined == len(BAD) == len(quarantined)
    assert dataset.counts.documents == 2
    assert [record.line for record in quarantined] == list(range(2, 2 + len(BAD)))
    assert quarantined[2].record == '{"text": "\\xff"}'
    assert all(len(record.record) <= 10_000 for record in quarantined)


WEIRD = [
    b"\xef\xbb\xbf",
    b'{"text": "a\xe2\x80\xa8b"}\r\n',
    b"\n  \r\n",
    b'{"id": 1, "text": "\\u00e9\\ud83d\\ude00", "meta": {"k": [1]}}\n',
    b'{"text": ""}\n',
    b'{"text": "   "}\n',
    b'{"text": "no newline"}',
]
WEIRD_TEXTS = ["a\N{LINE SEPARATOR}b", "é\N{GRINNING FACE}", "   ", "no newline"]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_marks_line_ends_blank_lines_and_empty_documents_are_no_faults(text_file, suffix):
    content = b"".join(WEIRD)
    if suffix == ".jsonl.gz":
        content = gzip.compress(content[:40]) + gzip.compress(content[40:])
    if suffix == ".jsonl.zst":
        content = zstandard.compress(content[:40]) + zstandard.compress(content[40:])
    dataset = JsonlDataset(text_file(content, f"web{suffix}"))
    assert list(dataset) == WEIRD_TEXTS
    counts = dataset.counts
    assert (counts.lines, counts.blank, counts.empty, counts.documents) == (7, 2, 1, 4)
    assert counts.describe() == "4 documents, 2 blank lines left out, 1 empty documents left out"


def test_a_truncated_archive_is_one_bad_record_behind_the_whole_ones(text_file):
    lines = b"".join(b'{"text": "document %d"}\n' % i for i in range(5000))
    file = text_file(gzip.compress(lines)[:-500], "web.jsonl.gz")
    with pytest.raises(UserError, match=r"web\.jsonl\.gz:\d+: the compressed stream ends early"):
        list(JsonlDataset(file))
    quarantined = []
    texts = list(JsonlDataset(file, quarantined.append))
    assert texts
    assert texts == [f"document {i}" for i in range(len(texts))]
    assert [record.reason for record in quarantined] == ["the compressed stream ends early"]


@given(st.lists(st.sampled_from([b"", b" \r", b'{"text": "x"}', b'{"text": ""}', b"{", b"\xff"])))
@settings(deadline=None)
def test_every_line_is_accounted_for(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    dataset = JsonlDataset(TextFile(path, "a.jsonl"), lambda record: None)
    texts = list(dataset)
    counts = dataset.counts
    assert counts.lines == len(lines)
    assert counts.lines == counts.blank + counts.empty + counts.quarantined + counts.documents
    assert counts.documents == len(texts)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans())
def test_any_text_survives_json(text, ascii_only):
    line = json.dumps({"text": text}, ensure_ascii=ascii_only).encode()
    assert parse_record(line) == text


def test_a_text_file_is_one_document(text_file):
    dataset = JsonlDataset(text_file(b"\xef\xbb\xbfone\r\ntwo\n\n three\rfour", "book.txt"))
    assert list(dataset) == ["one\ntwo\n\n three\nfour"]
    assert dataset.counts.lines == 1


@pytest.mark.parametrize(
    ("content", "reason"), [(b"\x00\x01", "a binary file"), (b"a\xff", "not UTF-8: byte 0xFF")]
)
def test_a_text_file_that_is_no_text_is_refused(text_file, content, reason):
    with pytest.raises(UserError, match=rf"book\.txt:1: {reason}"):
        list(JsonlDataset(text_file(content, "book.txt")))


def test_an_empty_text_file_has_no_document(text_file):
    dataset = JsonlDataset(text_file(b" \n", "book.txt"))
    assert list(dataset) == []
    assert dataset.counts.blank == 1


def test_a_file_that_went_away_is_named(text_file):
    file = text_file(b"")
    file.path.unlink()
    with pytest.raises(UserError, match=r"web\.jsonl cannot be read: No such file"):
        list(JsonlDataset(file))


def test_a_reason_never_holds_the_whole_list_of_keys():
    with pytest.raises(BadRecord) as caught:
        parse_record(json.dumps({f"key{i}": i for i in range(100)}).encode())
    assert len(str(caught.value)) < 200
