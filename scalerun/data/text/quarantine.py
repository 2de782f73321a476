"""QuarantineFile: the bad records that a run left out, for a person to repair."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from scalerun.data.text.jsonl_dataset import QuarantinedRecord
from scalerun.dataclass.errors import UserError

logger = logging.getLogger(__name__)


class QuarantineFile:
    """Appends bad records to a JSON-lines file, each once, however often a run is resumed.

    Args:
        path: made, with its folder, at the first bad record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: set[tuple[str, int, str]] | None = None

    def add(self, records: Sequence[QuarantinedRecord]) -> None:
        """Write the records that are not in the file yet.

        Raises:
            UserError: the file cannot be written.
        """
        if not records:
            return
        try:
            if self._known is None:
                self._known = self._read()
            fresh = [r for r in records if (r.file, r.line, r.reason) not in self._known]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(record)) + "\n" for record in fresh)
        except OSError as error:
            raise UserError(
                f"the list of bad records {self.path} cannot be written: {error.strerror}"
            ) from error
        self._known.update((record.file, record.line, record.reason) for record in fresh)
        logger.warning(
            "%d bad records in %s were left out; they are listed in %s",
            len(records), records[0].file, self.path,
        )  # fmt: skip

    def _read(self) -> set[tuple[str, int, str]]:
        known = set()
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                    known.add((record["file"], record["line"], record["reason"]))
                except (ValueError, KeyError):
                    continue  # a line that a killed process did not finish
        return known
