"""Records: the lines of ``metrics.jsonl`` and what people read of them.

A record is a flat mapping with a ``kind``: ``train``, ``valid`` or ``event``. Every record that
belongs to an update carries ``num_updates``. A number that is not finite is written as ``null``,
so that each line is JSON for every parser.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from scalerun.dataclass.errors import UserError

Scalar: TypeAlias = str | int | float | bool | None
RecordValue: TypeAlias = Scalar | list["RecordValue"] | dict[str, "RecordValue"]
Record: TypeAlias = Mapping[str, RecordValue]

_SHOWN_FIRST = ("epoch", "num_updates", "loss", "ppl", "bits_per_byte")
_LABELS = {"num_updates": "update", "bits_per_byte": "bits/byte", "wps": "tokens/s"}
_HIDDEN = ("kind", "event")
# Whoever wants these reads metrics.jsonl; a line for people has to fit on a screen.
_HIDDEN_IN_TRAIN = (
    *_HIDDEN,
    "clip",
    "gnorm_dense",
    "gnorm_expert",
    "ups",
    "wpb",
    "bsz",
    "tokens_seen",
    "train_wall",
    "tflops",
    "mfu",
    "peak_memory_gib",
    "peak_reserved_gib",
    "expert1_balance_bottom",
    "expert2_balance_bottom",
    "expert2_balance_top",
    "unused_expert2_count",
)
_HIDDEN_IN_DATA = (
    *_HIDDEN,
    "corpora",
    "num_corpora",
    "lines",
    "lines_blank",
    "lines_empty",
    "lines_other_part",
    "lines_documents",
    "fingerprint",
)


def _finite(value: RecordValue) -> RecordValue:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value


def encode_record(record: Record) -> str:
    """One line of JSON without its line feed, in ASCII; numbers in full precision.

    Raises:
        TypeError: a value is no JSON value, for instance a tensor.
    """
    return json.dumps(_finite(dict(record)), allow_nan=False)


def read_records(path: Path, *, current: bool = True) -> list[dict[str, RecordValue]]:
    """The records of a ``metrics.jsonl``.

    A run that was killed and started again repeats the updates after its last checkpoint.

    Args:
        path: the file; a torn last line is left out.
        current: leave out records that a restart replaced: those before a ``resumed`` event whose
            update is above the event's. Otherwise give every record that was ever written.

    Raises:
        UserError: the file cannot be read, or a line before the last is not a JSON object.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    records: list[dict[str, RecordValue]] = []
    for number, line in enumerate(lines[:-1], start=1):
        record = parse_record(line)
        if record is None:
            raise UserError(f"{path}:{number}: not a JSON object; remove the line")
        if current and record.get("event") == "resumed":
            resumed_at = update_of(record)
            records = [old for old in records if update_of(old) <= resumed_at]
        records.append(record)
    return records


def parse_record(line: bytes) -> dict[str, RecordValue] | None:
    """The JSON object of a line, or None where the line is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def update_of(record: Record) -> int:
    """Finished updates at the time of a record; 0 where it does not say."""
    value = record.get("num_updates")
    return value if isinstance(value, int) else 0


def _show(key: str, value: RecordValue) -> str:
    label = _LABELS.get(key, key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{label} {value}"
    if key == "wps" or (isinstance(value, int) and abs(value) >= 10_000):
        return f"{label} {value:,.0f}"
    if isinstance(value, int):
        return f"{label} {value}"
    return f"{label} {value:.4g}" if abs(value) < 1e4 else f"{label} {value:,.0f}"


def describe_record(record: Record) -> str:
    """One line for people: rounded numbers, the most wanted first, no lists of averages."""
    kind = record.get("kind")
    title = record.get("subset") if kind == "valid" else record.get("event", kind)
    first = [key for key in _SHOWN_FIRST if key in record]
    hidden: tuple[str, ...] = _HIDDEN_IN_TRAIN if kind == "train" else _HIDDEN
    if kind == "valid":
        hidden = (*hidden, "subset")
    if record.get("event") == "data":
        hidden = _HIDDEN_IN_DATA
        if not record.get("lines_quarantined"):
            hidden = (*hidden, "lines_quarantined")
    if record.get("loss_scale") == 1:
        hidden = (*hidden, "loss_scale")
    if kind == "train":
        hidden = (*hidden, *(key for key, value in record.items() if isinstance(value, list)))
    rest = [key for key in record if key not in _SHOWN_FIRST and key not in hidden]
    return " | ".join([str(title), *(_show(key, record[key]) for key in [*first, *rest])])
