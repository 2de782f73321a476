import gzip

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerun.data.text import text_stream
from scalerun.data.text.text_stream import StreamError, read_lines


def compress(content, suffix):
    if suffix == ".gz":
        return gzip.compress(content)
    return zstandard.compress(content) if suffix == ".zst" else content


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("streams")


@given(
    parts=st.lists(st.binary(max_size=30), max_size=4),
    suffix=st.sampled_from(["", ".gz", ".zst"]),
    chunk=st.integers(1, 7),
)
@settings(max_examples=150, deadline=None)
def test_lines_end_at_line_feeds_only_wherever_chunks_end(folder, parts, suffix, chunk):
    path = folder / f"x{suffix}"
    path.write_bytes(b"".join(compress(part, suffix) for part in parts))
    content = b"".join(parts)
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    before = text_stream.CHUNK_BYTES, text_stream.COMPRESSED_CHUNK_BYTES
    text_stream.CHUNK_BYTES = text_stream.COMPRESSED_CHUNK_BYTES = chunk
    try:
        found = list(read_lines(path))
    finally:
        text_stream.CHUNK_BYTES, text_stream.COMPRESSED_CHUNK_BYTES = before
    if content == b"\xef\xbb\xbf":
        lines = [b"", b""]  # the mark stands for one empty line
    assert found == (lines[:-1] if lines[-1] == b"" else lines)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_truncated_stream_ends_in_an_error_behind_its_lines(folder, suffix, cut):
    path = folder / f"cut{suffix}"
    path.write_bytes(compress(b"one\ntwo\n" * 50, suffix)[:cut])
    *lines, error = read_lines(path)
    assert isinstance(error, StreamError)
    assert "ends early" in str(error)
    assert all(line in (b"one", b"two") for line in lines)


@pytest.mark.parametrize("chunk", [3, 1 << 16])
def test_zeros_behind_gzip_members_are_padding(folder, monkeypatch, chunk):
    monkeypatch.setattr(text_stream, "COMPRESSED_CHUNK_BYTES", chunk)
    path = folder / "padded.gz"
    member = gzip.compress(b"one\n")
    path.write_bytes(member + b"\0" * 20 + member + b"\0" * 512)
    assert list(read_lines(path)) == [b"one", b"one"] == gzip.decompress(path.read_bytes()).split()
    for content in (b"\0" * 20 + member, member + b"\0" * 20 + b"x" * 20):
        path.write_bytes(content)
        assert isinstance(list(read_lines(path))[-1], StreamError)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_stream_ends_in_an_error(folder, suffix):
    path = folder / f"bad{suffix}"
    path.write_bytes(b"this is not compressed at all")
    (error,) = read_lines(path)
    assert "is damaged" in str(error)


def test_an_endless_line_is_reported_and_skipped(folder, monkeypatch):
    monkeypatch.setattr(text_stream, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(text_stream, "CHUNK_BYTES", 4)
    path = folder / "long"
    path.write_bytes(b"short\n" + b"x" * 25 + b"\nlast")
    first, error, last = read_lines(path)
    assert (first, last) == (b"short", b"last")
    assert "25 bytes" in str(error)
