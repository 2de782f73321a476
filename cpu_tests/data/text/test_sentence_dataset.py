import pytest

from scalerun.data.text.corpus_index import ListedFile
from scalerun.data.text.sentence_dataset import SentenceDataset
from scalerun.dataclass.errors import UserError


@pytest.fixture
def read(tmp_path):
    def read(content, on_bad_record=None):
        path = tmp_path / "shard.txt"
        path.write_bytes(content)
        dataset = SentenceDataset(ListedFile(path, "shard.txt", "en"), on_bad_record)
        return list(dataset), dataset.counts

    return read


def test_blank_lines_separate_documents(read):
    texts, counts = read("\ufeff\n a b \r\nc\n\n \n\nd \u00e9\n".encode())
    assert texts == ["a b\nc", "d \u00e9"]
    assert (counts.lines, counts.blank, counts.documents, counts.continued) == (7, 4, 2, 1)


def test_every_line_is_accounted_for(read):
    bad = []
    texts, counts = read(b"one\ntwo\n\xff\xfe\n\nthree\n\0\n", bad.append)
    assert texts == ["one\ntwo", "three"]
    assert [(record.line, record.reason.split(":")[0]) for record in bad] == [
        (3, "not UTF-8"),
        (6, "a binary file (NUL byte at character 1)"),
    ]
    assert counts.lines == counts.blank + counts.quarantined + counts.documents + counts.continued


def test_a_bad_line_stops_with_its_number(read):
    with pytest.raises(UserError, match=r"shard\.txt:2: not UTF-8: byte 0xFF at byte 5 ?;.*skip"):
        read(b"good\nbad \xff\n")


@pytest.mark.parametrize("content", [b"", b"\n", b" \n\n"])
def test_a_file_without_sentences_is_bad(read, content):
    with pytest.raises(UserError, match=r"shard\.txt:\d: the file has no sentence; repair it"):
        read(content)
    bad = []
    assert read(content, bad.append)[0] == []
    assert len(bad) == 1
