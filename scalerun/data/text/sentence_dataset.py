"""SentenceDataset: the documents of a text file with one sentence on each line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from scalerun.data.text.document_kind import DocumentKind, encode_texts
from scalerun.data.text.jsonl_dataset import BadRecord, JsonlDataset, parse_text
from scalerun.data.text.text_stream import StreamError, read_lines


class SentenceDataset(JsonlDataset):
    """Iterates over documents that blank lines separate; their lines are joined by line feeds.

    White space around a line is dropped. A file without any sentence is a bad record.
    """

    def _documents(self) -> Iterator[str]:
        counts = self.counts
        document: list[str] = []
        for line in read_lines(self.file.path):
            counts.lines += 1
            try:
                sentence = _sentence(line)
            except BadRecord as error:
                counts.quarantined += 1
                self._report(line, str(error))
                continue
            if sentence:
                counts.documents += not document
                counts.continued += bool(document)
                document.append(sentence)
                continue
            counts.blank += 1
            if document:
                yield "\n".join(document)
                document = []
        if document:
            yield "\n".join(document)
        if not counts.documents and not counts.quarantined:
            if not counts.lines:  # even an empty file has a place to point at
                counts.lines = counts.quarantined = 1
            self._report(b"", "the file has no sentence")


def line_of_sentence(path: Path, number: int) -> int:
    """The line, from 1, of a file's sentence with this number, from 0; bad records do not count."""
    passed = 0
    for line, content in enumerate(read_lines(path), start=1):
        with contextlib.suppress(BadRecord):
            if _sentence(content):
                if passed == number:
                    return line
                passed += 1
    raise ValueError(f"{path} has no sentence {number}, only {passed}")


def _sentence(line: bytes | StreamError) -> str:
    if isinstance(line, StreamError):
        raise BadRecord(str(line))
    return parse_text(line).replace("\n", " ").strip()


SENTENCES = DocumentKind("one sentence a line", SentenceDataset, encode_texts)
"""Lines that make documents, with blank lines between these."""
