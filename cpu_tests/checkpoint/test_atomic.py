import hashlib
import io
import os

import pytest

from scalerun.checkpoint import atomic


def test_hashing_writer_counts_and_hashes_what_it_passes_on():
    sink = io.BytesIO()
    writer = atomic.HashingWriter(sink)
    writer.write(b"one")
    assert writer.tell() == 3
    writer.write(memoryview(b"two"))
    assert sink.getvalue() == b"onetwo"
    assert writer.record() == atomic.FileRecord(6, hashlib.sha256(b"onetwo").hexdigest())


def test_hashing_writer_keeps_the_first_error():
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(28, "No space left on device")

    writer = atomic.HashingWriter(Full())
    with pytest.raises(OSError, match="No space"):
        writer.write(b"x")
    assert writer.failure.errno == 28


def test_asking_for_the_descriptor_flushes(tmp_path):
    with (tmp_path / "f").open("wb") as stream:
        writer = atomic.HashingWriter(stream)
        writer.write(b"abc")
        assert os.fstat(writer.fileno()).st_size == 3


def test_record_of_a_written_file_is_that_of_the_file(tmp_path):
    record = atomic.write_file(tmp_path / "a/b", b"content")
    assert record == atomic.FileRecord(7, atomic.hash_file(tmp_path / "a/b"))


def test_replacing_a_file_never_shows_half_of_it(tmp_path, monkeypatch):
    path = tmp_path / "pointer"
    path.write_text("old")
    seen = []
    replace = os.replace

    def spy(source, target):
        seen.append((path.read_text(), source.read_text()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    atomic.replace_file(path, b"new")
    assert seen == [("old", "new")]
    assert [entry.name for entry in tmp_path.iterdir()] == ["pointer"]


def test_a_replaced_file_is_the_old_one_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with atomic.replacing(path) as stream:
        stream.write(b"new")
        stream.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    with pytest.raises(KeyError), atomic.replacing(path) as stream:
        stream.write(b"half")
        raise KeyError
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
