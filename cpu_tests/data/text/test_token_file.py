import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerun.data.text.jsonl_dataset import QuarantinedRecord, ReadCounts
from scalerun.data.text.token_file import HEADER_BYTES, InvalidTokenFile, TokenFile, TokenFileWriter

RECORDS = [QuarantinedRecord("a.jsonl", 3, "not JSON", "{é")]


def write(path, documents, *, dtype="uint16", records=(), batch=2):
    with TokenFileWriter(path, key="k", dtype=dtype, end_id=2) as writer:
        for i in range(0, len(documents), batch):
            part = documents[i : i + batch]
            writer.add(part, [len(d) * 3 for d in part])
        writer.commit(ReadCounts(lines=len(documents), documents=len(documents)), list(records))


@given(
    documents=st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=9),
    dtype=st.sampled_from(["uint16", "uint32"]),
)
@settings(max_examples=60, deadline=None)
def test_documents_come_back_with_their_ends_and_sizes(tmp_path_factory, documents, dtype):
    path = tmp_path_factory.mktemp("tokens") / "a.tokens"
    write(path, documents, dtype=dtype, records=RECORDS)
    file = TokenFile.open(path, "k")
    file.verify()
    found = [
        file.tokens[file.ends[i] : file.ends[i + 1]].tolist() for i in range(file.num_documents)
    ]
    assert found == [[*document, 2] for document in documents]
    assert file.document_bytes.tolist() == [3 * len(document) for document in documents]
    assert file.num_bytes == 3 * sum(map(len, documents))
    assert file.num_tokens == sum(len(document) + 1 for document in documents)
    assert file.counts.documents == len(documents)
    assert file.quarantined == RECORDS
    assert file.tokens.dtype == np.dtype(dtype)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.tokens"
    write(path, [[5, 6, 7], [8]] * 50)
    return path


def test_every_truncation_is_noticed(path):
    content = path.read_bytes()
    for size in (0, 7, HEADER_BYTES - 1, HEADER_BYTES, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(InvalidTokenFile):
            TokenFile.open(path, "k")


def test_every_changed_byte_is_noticed(path):
    content = path.read_bytes()
    header_end = content.index(b"\0\0\0\0\0\0\0\0", 16)
    places = [*range(0, header_end, 7), *range(HEADER_BYTES, len(content), 11)]
    for place in places:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(InvalidTokenFile):
            TokenFile.open(path, "k").verify()


def test_a_file_for_another_key_is_refused(path):
    with pytest.raises(InvalidTokenFile, match="other text"):
        TokenFile.open(path, "another")


def test_an_interrupted_writer_leaves_nothing(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        TokenFileWriter(tmp_path / "b.tokens", key="k", dtype="uint16", end_id=2) as writer,
    ):
        writer.add([[1, 2]], [3])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
