import os

import pytest

from scalerun.data.text import digests
from scalerun.data.text.digests import DigestMemo, file_digest
from scalerun.dataclass.errors import UserError


@pytest.fixture
def old_file(tmp_path, monkeypatch):
    """A file whose last change is settled."""
    monkeypatch.setattr(digests, "SETTLED_NS", 0)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"content")
    return path


@pytest.fixture
def count_reads(monkeypatch):
    reads = []
    monkeypatch.setattr(
        digests,
        "file_digest",
        lambda path, pieces=0: reads.append(path) or file_digest(path, pieces),
    )
    return reads


def test_an_unchanged_file_is_read_once_even_by_another_process(tmp_path, old_file, count_reads):
    memo = DigestMemo(tmp_path / "memo.json")
    first = memo.whole(old_file)
    assert memo.whole(old_file) == memo.sampled(old_file) == first
    assert memo.remembers(old_file)
    memo.save()
    assert DigestMemo(tmp_path / "memo.json").whole(old_file) == first
    assert len(count_reads) == 1


def test_a_changed_file_of_equal_size_gets_another_digest(tmp_path, old_file):
    memo = DigestMemo(tmp_path / "memo.json")
    before = memo.whole(old_file)
    stat = old_file.stat()
    old_file.write_bytes(b"CONTENT")
    os.utime(old_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # ctime still gives it away
    assert memo.whole(old_file) != before


def test_a_file_that_was_just_written_is_not_remembered(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"1")
    memo = DigestMemo(tmp_path / "memo.json")
    memo.whole(path)
    assert not memo.remembers(path)


def test_a_damaged_memo_only_costs_time(tmp_path, old_file):
    for content in ("", "[]", "{", "\0"):
        (tmp_path / "memo.json").write_text(content)
        memo = DigestMemo(tmp_path / "memo.json")
        assert memo.whole(old_file) == file_digest(old_file)
        memo.save()


def test_two_processes_keep_each_others_entries(tmp_path, old_file):
    other = tmp_path / "b"
    other.write_bytes(b"b")
    one, two = DigestMemo(tmp_path / "memo.json"), DigestMemo(tmp_path / "memo.json")
    one.whole(old_file)
    two.whole(other)
    one.save()
    two.save()
    assert DigestMemo(tmp_path / "memo.json").remembers(old_file)


def test_what_another_process_learns_later_is_taken_over(tmp_path, old_file, count_reads):
    waiting = DigestMemo(tmp_path / "memo.json")
    other = DigestMemo(tmp_path / "memo.json")
    digest = other.whole(old_file)
    other.save()
    assert waiting.whole(old_file) == digest
    assert len(count_reads) == 1


def test_large_files_are_sampled_and_size_always_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "SAMPLE_BYTES", 640)
    path = tmp_path / "large"
    path.write_bytes(bytes(10_000))
    sampled, whole = file_digest(path, 64), file_digest(path)
    assert sampled != whole
    path.write_bytes(bytes(10_001))
    assert file_digest(path, 64) != sampled
    path.write_bytes(bytes(9_999) + b"x")
    assert file_digest(path, 64) != sampled


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="gone cannot be read: No such file"):
        DigestMemo(tmp_path / "memo.json").whole(tmp_path / "gone")
