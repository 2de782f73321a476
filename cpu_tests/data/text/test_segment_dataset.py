import pytest

from scalerun.data.text.segment_dataset import SegmentDataset, SegmentFile
from scalerun.dataclass.errors import UserError


@pytest.fixture
def segments(tmp_path):
    def make(content):
        path = tmp_path / "train.en"
        path.write_bytes(content)
        return SegmentFile(path, "train.en")

    return make


def test_line_n_of_the_file_is_text_n(segments):
    content = "\ufeffone\r\n\n  \ntwo\u2028words\ncaf\u00e9 ".encode()
    dataset = SegmentDataset(segments(content))
    assert list(dataset) == ["one", "", "", "two\u2028words", "caf\u00e9 "]
    assert dataset.counts.lines == 5


def test_a_line_that_is_not_utf_8_is_named(segments):
    with pytest.raises(UserError, match=r"train.en:2: not UTF-8: byte 0xE9 at byte 2"):
        list(SegmentDataset(segments(b"a\nb\xe9\n")))


def test_a_bad_line_keeps_its_place(segments):
    bad = []
    assert list(SegmentDataset(segments(b"a\n\xff\nc\n"), bad.append)) == ["a", "", "c"]
    assert [(record.file, record.line) for record in bad] == [("train.en", 2)]
