"""TokenCache: tokenises each text file once and keeps the result."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scalerun.data.text.digests import DigestMemo
from scalerun.data.text.document_kind import PLAIN_TEXT, DocumentKind
from scalerun.data.text.jsonl_dataset import JsonlDataset, QuarantinedRecord
from scalerun.data.text.layout import TextFile
from scalerun.data.text.part import Part
from scalerun.data.text.token_file import InvalidTokenFile, TokenFile, TokenFileWriter
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer, content_digest
from scalerun.dataclass.errors import UserError

logger = logging.getLogger(__name__)

FORMAT = "1"
"""Part of every key: raise it when reading or tokenising changes its result."""
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 4096
POLL_SECONDS = 0.05
LOG_AFTER_SECONDS = 1.0
LOGGED_MEGABYTES = 1.0
"""Smaller files are only named in the debug log; there may be thousands."""
MAX_NAME = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class PreparationStopped(Exception):
    """Tokenising was given up; finished files stay, the others are made again when needed."""


def never() -> bool:
    """Nobody asks to stop."""
    return False


class TokenCache:
    """Token files in one folder, each named by the content it was made from.

    A file that is damaged, unfinished or made from other text is made again. Any number of
    processes may use one folder: a lock makes one of them tokenise a file while the others wait.

    Args:
        folder: where token files are kept; made if missing.
        tokenizer: makes the tokens.
        skip_bad_records: leave bad records out instead of stopping at the first.
        num_threads: threads of the tokenizer.
        part: which documents to keep; None for all.
        kind: what the files hold, and how it becomes tokens.

    Raises:
        UserError: the folder cannot be made or written to.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: BaseTokenizer,
        *,
        skip_bad_records: bool = False,
        num_threads: int = 1,
        part: Part | None = None,
        kind: DocumentKind = PLAIN_TEXT,
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.skip_bad_records = skip_bad_records
        self.num_threads = num_threads
        self.part = part
        self.kind = kind
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True)
        self.digests = DigestMemo(folder / "digests.json")

    def load(self, file: TextFile, should_stop: Callable[[], bool] = never) -> TokenFile:
        """The tokens of a text file, made now if need be.

        Raises:
            UserError: a bad record, an unreadable file, a folder that cannot be written to.
            PreparationStopped: ``should_stop`` turned true before the tokens were there.
        """
        path, key = self._place(file)
        tokens = self._open(path, key)
        if tokens is not None:
            return tokens
        with self._explained():
            self.folder.mkdir(exist_ok=True)  # somebody may have emptied the run folder
        with self._explained(), self._lock(path, should_stop) as alone:
            tokens = self._open(path, key)  # another process may have made it meanwhile
            if tokens is None:
                with TokenFileWriter(
                    path,
                    key=key,
                    dtype=self.tokenizer.dictionary.token_dtype,
                    end_id=self.tokenizer.dictionary.eos,
                    alone=alone,
                ) as writer:
                    self._build(file, writer, should_stop)
                tokens = self._open(path, key)
        if tokens is None:
            raise UserError(f"{path} cannot be read back after it was written; check the disk")
        return tokens

    def peek(self, file: TextFile) -> TokenFile | None:
        """The tokens of a text file, if they are there and found without reading the text."""
        if not self.digests.remembers(file.path):
            return None
        return self._open(*self._place(file))

    def _place(self, file: TextFile) -> tuple[Path, str]:
        content = self.digests.whole(file.path)
        part = () if self.part is None else (repr(self.part),)
        kind = () if self.kind is PLAIN_TEXT else (self.kind.name,)
        key = content_digest(FORMAT, content, file.suffix, self.tokenizer.digest, *part, *kind)
        readable = _UNSAFE.sub("_", file.corpus)[:MAX_NAME]
        return self.folder / f"{readable}-{key[:32]}.tokens", key

    def _open(self, path: Path, key: str) -> TokenFile | None:
        try:
            tokens = TokenFile.open(path, key)
            if not self._is_verified(path):
                tokens.verify()
                self._mark_verified(path)
        except FileNotFoundError:
            return None
        except InvalidTokenFile as error:
            logger.warning("%s is made again: %s", path, error)
            return None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        # A run that must stop at bad records has to meet them again, to name the first.
        return tokens if self.skip_bad_records or not tokens.quarantined else None

    def _is_verified(self, path: Path) -> bool:
        try:
            return path.with_suffix(".verified").read_text() == _state(path)
        except (OSError, UnicodeDecodeError):
            return False

    def _mark_verified(self, path: Path) -> None:
        # Only saves a reading of the file at the next start.
        with contextlib.suppress(OSError):
            path.with_suffix(".verified").write_text(_state(path))

    def _build(
        self, file: TextFile, writer: TokenFileWriter, should_stop: Callable[[], bool]
    ) -> None:
        start = time.monotonic()
        before = file.path.stat()
        quarantined: list[QuarantinedRecord] = []
        on_bad_record = quarantined.append if self.skip_bad_records else None
        documents = self.kind.reader(file, on_bad_record, part=self.part)
        for texts in _in_batches(documents):
            if should_stop():
                raise PreparationStopped(f"{file.path} was not tokenised to its end")
            encoded = self.kind.encode(self.tokenizer, texts, self.num_threads)
            writer.add(encoded.ids, encoded.num_bytes, encoded.sources)
        after = file.path.stat()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise UserError(f"{file.path} changed while it was read; start again")
        writer.commit(documents.counts, quarantined)
        seconds, size = time.monotonic() - start, before.st_size / 1e6
        logger.log(
            logging.INFO if size >= LOGGED_MEGABYTES else logging.DEBUG,
            "tokenised %s: %s; %.1f MB in %.1f s (%.1f MB/s)",
            file.path, documents.counts.describe(), size, seconds, size / seconds,
        )  # fmt: skip

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn a failure of the cache folder into one sentence."""
        try:
            yield
        except OSError as error:
            if not self.folder.parent.exists():
                raise UserError(
                    f"{self.folder.parent} with the token cache is gone: it was deleted or moved "
                    "during the run"
                ) from error
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full" if full else error.strerror
            raise UserError(
                f"the token cache {self.folder} cannot be written to: {reason}; make room or "
                "choose another folder with --cache-dir"
            ) from error

    @contextlib.contextmanager
    def _lock(self, path: Path, should_stop: Callable[[], bool]) -> Iterator[bool]:
        """Hold the lock of one token file; the system frees it when a process dies.

        Gives False where the file system has no locks: several processes may do the same work.
        """
        handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
        start, logged, held = time.monotonic(), False, True
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if should_stop():
                        raise PreparationStopped(f"still waiting for {path.name}") from None
                except OSError as error:
                    if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                        raise
                    held = False
                    break
                if not logged and time.monotonic() - start > LOG_AFTER_SECONDS:
                    logger.info("waiting for another process to tokenise %s", path.name)
                    logged = True
                time.sleep(POLL_SECONDS)
            yield held
            if held:
                fcntl.flock(handle, fcntl.LOCK_UN)  # also where a forked process shares the handle
        finally:
            os.close(handle)


def _state(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"


def _in_batches(documents: JsonlDataset) -> Iterator[list[str]]:
    """Group texts so that a batch holds about :data:`BATCH_CHARACTERS` characters."""
    texts: list[str] = []
    size = 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS or len(texts) >= BATCH_DOCUMENTS:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts
