"""What is printed about checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from scalerun.checkpoint.inspection import Finding, Inspection, TensorFacts
from scalerun.checkpoint.manifest import Manifest
from scalerun.checkpoint.reader import run_file
from scalerun.cli.inference import CONFIG_FILE
from scalerun.cli.weight_export import ties
from scalerun.dataclass.errors import UserError

UNSET: tuple[Any, ...] = (None, False, 0, 0.0, [], "")
"""Values of settings that the summary leaves out."""


def format_summary(found: Inspection) -> str:
    """Lines for people: where it comes from, the architecture, the parts."""
    facts = to_record(found, None)
    settings = facts["architecture"]
    shown = {k: v for k, v in settings.items() if v not in UNSET and k != "_name"}
    processes = "1 process" if facts["world_size"] == 1 else f"{facts['world_size']} processes"
    versions = f"scalerun {facts['scalerun_version']}, torch {facts['torch_version']}"
    lines = [str(found.path), f"update        {facts['num_updates']}"]
    if facts["epoch"] is not None:
        ended = ", which ended here" if found.manifest.epoch_end else ""
        lines.append(f"epoch         {facts['epoch']}{ended}")
    if found.manifest.metric is not None:
        name = (found.manifest.metric_name or "").lstrip("/")
        lines.append(f"metric        {name} {found.manifest.metric:g}")
    lines += [
        f"written by    {versions}, {processes}",
        f"size          {_size(found.manifest)}",
        f"architecture  {settings.get('_name')}"
        + "".join(f"\n              {name} {value}" for name, value in shown.items()),
        f"parameters    {facts['parameters']:,}",
        "",
    ]
    rows = [["part", "tensors", "elements", "bytes", "formats"]]
    for part in found.parts:
        own = found.tensors.get(part, [])
        formats = sorted({_name(t.dtype) for t in own})
        numbers = [len(own), sum(t.numel for t in own), sum(t.num_bytes for t in own)]
        cells = [f"{number:,}" for number in numbers] if own else ["-", "-", "-"]
        rows.append([part, *cells, ", ".join(formats)])
    return "\n".join(lines + _table(rows, left=(0, 4)))


def format_tensors(found: Inspection, part: str) -> str:
    """A table of one part's tensors.

    Raises:
        UserError: there are none.
    """
    rows = [["name", "shape", "format"]]
    rows += [[t.name, _shape(t.shape), _name(t.dtype)] for t in _tensors(found, part)]
    return "\n".join(_table(rows, left=(0, 1, 2)))


def to_record(found: Inspection, part: str | None) -> dict[str, Any]:
    """All facts as JSON values, with the tensors of one part, or of none.

    Raises:
        UserError: the part has no tensors.
    """
    manifest = found.manifest
    content = json.loads(run_file(found.path, CONFIG_FILE).read_text(encoding="utf-8"))
    settings = content.get("model") or {}
    twice = ties(settings)
    record: dict[str, Any] = {
        "path": str(found.path),
        "num_updates": manifest.num_updates,
        "epoch": found.epoch,
        "epoch_end": manifest.epoch_end,
        "metric": manifest.metric,
        "metric_name": manifest.metric_name,
        "scalerun_version": manifest.version,
        "torch_version": manifest.torch_version,
        "world_size": manifest.world_size,
        "files": len(manifest.files),
        "bytes": manifest.num_bytes,
        "architecture": settings,
        "parameters": sum(t.numel for t in found.tensors.get("model", []) if t.name not in twice),
        "parts": {name: len(found.tensors.get(name, [])) for name in found.parts},
    }
    if part is not None:
        record["tensors"] = [
            {"name": t.name, "shape": list(t.shape), "dtype": _name(t.dtype)}
            for t in _tensors(found, part)
        ]
    return record


def format_finding(finding: Finding) -> str:
    """One line on one checkpoint."""
    if finding.manifest is None:
        return f"{finding.path}: DAMAGED: {finding.fault}"
    return f"{finding.path}: whole ({_size(finding.manifest)})"


def _tensors(found: Inspection, part: str) -> list[TensorFacts]:
    if not found.tensors.get(part):
        raise UserError(
            f"checkpoint {found.path} has no tensors of --part {part}; those that have some: "
            f"{', '.join(found.tensors)}"
        )
    return found.tensors[part]


def _size(manifest: Manifest) -> str:
    files = "1 file" if len(manifest.files) == 1 else f"{len(manifest.files)} files"
    return f"{manifest.num_bytes:,} bytes in {files}"


def _table(rows: Sequence[Sequence[str]], *, left: Sequence[int]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
