"""JsonlDataset: the documents of one text file, with an account of every line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scalerun.data.text.layout import TextFile
from scalerun.data.text.part import Part
from scalerun.data.text.text_stream import MAX_LINE_BYTES, StreamError, read_chunks, read_lines
from scalerun.dataclass.errors import UserError

MAX_QUARANTINED_CHARACTERS = 10_000
MAX_KEYS_SHOWN = 8


class BadRecord(ValueError):
    """A line that holds no document; the message is the reason."""


@dataclass
class ReadCounts:
    """What became of the lines of a file.

    ``lines = blank + empty + quarantined + other_part + documents + continued``. A ``.txt`` file
    that is one document counts as one line.
    """

    lines: int = 0
    blank: int = 0
    """Lines with nothing but white space."""
    empty: int = 0
    """Documents whose text has no character; there is nothing to learn from them."""
    quarantined: int = 0
    """Bad records that ``--bad-records skip`` left out."""
    other_part: int = 0
    """Documents on the other side, where ``--valid-fraction`` divides the text."""
    documents: int = 0
    continued: int = 0
    """Lines behind the first of a document, in files of one sentence a line."""

    def describe(self) -> str:
        """For people: what there is, and what was left out."""
        left_out = {
            "blank lines": self.blank,
            "empty documents": self.empty,
            "bad records": self.quarantined,
            "documents of the other part": self.other_part,
        }
        parts = [f"{self.documents} documents"]
        return ", ".join(parts + [f"{n} {name} left out" for name, n in left_out.items() if n])

    def __add__(self, other: ReadCounts) -> ReadCounts:
        mine, theirs = asdict(self), asdict(other)
        return ReadCounts(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(frozen=True)
class QuarantinedRecord:
    """A bad record, and why it is one."""

    file: str
    line: int
    """From 1."""
    reason: str
    record: str
    """Its beginning; bytes that are not UTF-8 are written as backslash escapes."""


class JsonlDataset:
    """Iterates over the texts of a ``.jsonl`` file (also compressed) or of a ``.txt`` file.

    Each line is a JSON object whose key ``text`` is a document; other keys are ignored. A ``.txt``
    file is one document whose line ends become line feeds. With another ``parse`` lines hold
    documents of another kind, which ``.txt`` files cannot.

    Args:
        file: which file.
        on_bad_record: called with each bad record; None stops at the first one.
        part: which documents to give; None for all.
        parse: makes the document of a line, or raises :class:`BadRecord`; by default the value of
            ``text``. An empty document has nothing to learn from.

    Raises (while iterating):
        UserError: a bad record, with file, line and reason; or the file cannot be read.
    """

    def __init__(
        self,
        file: TextFile,
        on_bad_record: Callable[[QuarantinedRecord], None] | None = None,
        *,
        part: Part | None = None,
        parse: Callable[[bytes], str] | None = None,
    ) -> None:
        self.file = file
        self.on_bad_record = on_bad_record
        self.part = part
        self.parse = parse
        self.counts = ReadCounts()
        """Complete once the iteration has ended."""

    def __iter__(self) -> Iterator[str]:
        self.counts = ReadCounts()
        try:
            yield from self._documents()
        except OSError as error:
            raise UserError(f"{self.file.path} cannot be read: {error.strerror}") from error

    def _documents(self) -> Iterator[str]:
        counts = self.counts
        is_text = self.file.suffix == ".txt"
        if is_text and self.parse is not None:
            raise UserError(
                f"{self.file.path} is one text, and this --task reads records of more than a text; "
                "give .jsonl files"
            )
        records = [self._whole_file()] if is_text else read_lines(self.file.path)
        parse = parse_text if is_text else (self.parse or parse_record)
        for line in records:
            counts.lines += 1
            if isinstance(line, bytes) and not line.strip():
                counts.blank += 1
                continue
            try:
                if isinstance(line, StreamError):
                    raise BadRecord(str(line))
                text = parse(line)
            except BadRecord as error:
                counts.quarantined += 1
                self._report(line, str(error))
                continue
            if not text:
                counts.empty += 1
            elif self.part is not None and text not in self.part:
                counts.other_part += 1
            else:
                counts.documents += 1
                yield text

    def _whole_file(self) -> bytes | StreamError:
        size = self.file.path.stat().st_size
        if size > MAX_LINE_BYTES:
            return StreamError(f"the file has {size:,} bytes, more than {MAX_LINE_BYTES:,}")
        return b"".join(read_chunks(self.file.path))

    def _report(self, line: bytes | StreamError, reason: str) -> None:
        if self.on_bad_record is None:
            raise UserError(
                f"{self.file.path}:{self.counts.lines}: {reason}; repair it, or leave bad records "
                "out with --bad-records skip"
            )
        content = line[: 4 * MAX_QUARANTINED_CHARACTERS] if isinstance(line, bytes) else b""
        shown = content.decode(errors="backslashreplace")[:MAX_QUARANTINED_CHARACTERS]
        self.on_bad_record(QuarantinedRecord(self.file.name, self.counts.lines, reason, shown))


def parse_record(line: bytes) -> str:
    """The document of one JSON line.

    Raises:
        BadRecord: there is none.
    """
    return parse_strings(line, ("text",))[0]


def parse_strings(line: bytes, keys: Sequence[str]) -> list[str]:
    """The strings under some keys of a JSON object; other keys are ignored.

    Raises:
        BadRecord: the line is no such object.
    """
    try:
        record = json.loads(decode_line(line), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise BadRecord(f"not JSON: {error.msg} at character {error.pos + 1}") from error
    except RecursionError as error:
        raise BadRecord("not JSON: nested too deeply") from error
    except ValueError as error:
        raise BadRecord(f"not JSON: {error}") from error
    if isinstance(record, _DuplicateKey):
        raise BadRecord(f"the key {record.key!r} appears twice")
    if not isinstance(record, dict):
        wanted = " and ".join(repr(key) for key in keys)
        raise BadRecord(f"{_kind(record)} instead of a JSON object with the key {wanted}")
    return [_string(record, key) for key in keys]


def parse_text(content: bytes) -> str:
    """The document of a ``.txt`` file.

    Raises:
        BadRecord: it is not UTF-8, or has NUL bytes as binary files do.
    """
    text = decode_line(content.removeprefix(b"\xef\xbb\xbf"))
    if "\0" in text:
        raise BadRecord(f"a binary file (NUL byte at character {text.index(chr(0)) + 1})")
    return text.replace("\r\n", "\n").replace("\r", "\n")


class _DuplicateKey:
    def __init__(self, key: str) -> None:
        self.key = key


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _DuplicateKey:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    keys = [key for key, _ in pairs]
    return _DuplicateKey(next(key for key in keys if keys.count(key) > 1))


def _string(record: dict[str, Any], key: str) -> str:
    if key not in record:
        keys = [repr(each) for each in record]
        shown = ", ".join(keys[:MAX_KEYS_SHOWN]) + (", ..." if keys[MAX_KEYS_SHOWN:] else "")
        raise BadRecord(f"no key {key!r} (keys: {shown or 'none'})")
    text = record[key]
    if not isinstance(text, str):
        raise BadRecord(f"the value of {key!r} is {_kind(text)} instead of a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(
            f"{key!r} has half a surrogate pair at character {error.start + 1}"
        ) from error
    return text


def decode_line(content: bytes) -> str:
    """Text of UTF-8 bytes.

    Raises:
        BadRecord: they are not.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        hint = " (the file is not text, or is in another encoding)" if error.start == 0 else ""
        raise BadRecord(f"not UTF-8: byte 0x{bad:02X} at byte {error.start + 1}{hint}") from error


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {dict: "an object", list: "a list", str: "a string", _DuplicateKey: "an object"}
    return names.get(type(value), "a number")
