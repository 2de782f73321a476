"""SegmentDataset: the lines of a plain text file, none left out, so that their numbers stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scalerun.data.text.document_kind import DocumentKind, encode_texts
from scalerun.data.text.jsonl_dataset import BadRecord, JsonlDataset, decode_line
from scalerun.data.text.layout import TextFile
from scalerun.data.text.text_stream import StreamError, read_lines


@dataclass(frozen=True)
class SegmentFile(TextFile):
    """A file with one segment a line, whatever its name ends in."""

    @property
    def suffix(self) -> str:
        return "one segment a line"

    @property
    def corpus(self) -> str:
        return self.path.name


class SegmentDataset(JsonlDataset):
    """Iterates over the lines of a text file.

    A line of white space, and a bad record that is not to stop at, give an empty text.
    """

    def _documents(self) -> Iterator[str]:
        counts = self.counts
        for line in read_lines(self.file.path):
            counts.lines += 1
            counts.documents += 1
            text = ""
            try:
                if isinstance(line, StreamError):
                    raise BadRecord(str(line))
                text = decode_line(line).rstrip("\r")
            except BadRecord as error:
                counts.quarantined += 1
                self._report(line, str(error))
            yield text if text.strip() else ""


SEGMENTS = DocumentKind("one segment a line", SegmentDataset, encode_texts)
"""Lines of which each is a text of its own."""
