"""The files of one checkpoint of metaseq: one for each tensor rank and each data-parallel rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.weight_file import WEIGHTS, float_tensors, read_content, record_of

NAME = re.compile(r"(?P<stem>.+?)(?:-model_part-(?P<part>\d+))?(?:-shard(?P<shard>\d+))?\.pt")
METADATA = "shard_metadata"


@dataclass(frozen=True)
class MetaseqFile:
    """What one file holds."""

    path: Path
    state: Mapping[str, Tensor]
    metadata: Any
    """How flat parameters were made; None where there are none."""
    record: Mapping[str, Any] | None
    """Settings of the model; None where the file has none."""


def find_files(path: Path) -> list[list[Path]]:
    """The files of a checkpoint: for each tensor rank those of its data-parallel ranks.

    Args:
        path: one of them, or their name without the ranks.

    Raises:
        UserError: there are none, or one is missing.
    """
    match = NAME.fullmatch(path.name)
    if match is None or path.is_dir():
        what = "is a folder" if path.is_dir() else "does not end in .pt"
        raise UserError(f"{path} {what}; name a file of a metaseq checkpoint")
    if path.is_file() and match["part"] is match["shard"] is None:
        return [[path]]
    found: dict[tuple[int, int], Path] = {}
    for each in path.parent.glob(f"{_escaped(match['stem'])}-*.pt"):
        other = NAME.fullmatch(each.name)
        if other is not None and other["stem"] == match["stem"]:
            found[int(other["part"] or 0), int(other["shard"] or 0)] = each
    if not found:
        raise UserError(f"{path} does not exist, nor do files of ranks beside it ({path.stem}-…)")
    parts, shards = (1 + max(place[axis] for place in found) for axis in (0, 1))
    for part in range(parts):
        for shard in range(shards):
            if (part, shard) not in found:
                raise UserError(
                    f"{path.parent} lacks the file of tensor rank {part} and data-parallel rank "
                    f"{shard} of {match['stem']}, which others go beyond"
                )
    return [[found[part, shard] for shard in range(shards)] for part in range(parts)]


def _escaped(stem: str) -> str:
    return re.sub(r"([\[?*])", r"[\1]", stem)


def read_file(path: Path, *, allow_namespace: bool) -> MetaseqFile:
    """Read one file; nothing that it holds is executed.

    Args:
        allow_namespace: also read settings that are an ``argparse.Namespace``.

    Raises:
        UserError: it is damaged, names foreign classes, or has no weights.
    """
    content = read_content(path, allow_namespace=allow_namespace)
    weights = content.get(WEIGHTS)
    if not isinstance(weights, Mapping):
        raise UserError(f"{path} has no {WEIGHTS!r}, where metaseq keeps the weights")
    state = float_tensors(path, weights)
    return MetaseqFile(path, state, content.get(METADATA), record_of(content))
