"""A checkpoint's weights -> one file, under our names or another library's."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalerun import __version__
from scalerun.checkpoint.atomic import replace_file
from scalerun.checkpoint.consolidation import weight_entries
from scalerun.checkpoint.manifest import read_manifest
from scalerun.checkpoint.reader import find_checkpoint, run_file
from scalerun.checkpoint.safetensors_file import Entry, write_safetensors
from scalerun.cli.inference import CONFIG_FILE, stored_config
from scalerun.models.torchscale.export import (
    Piece,
    torchscale_fields,
    torchscale_pieces,
    torchscale_tables,
)
from scalerun.plugins import plugin_errors

logger = logging.getLogger(__name__)


def consolidated(
    path: str, output: Path, *, part: str, dtype: torch.dtype | None
) -> tuple[int, int]:
    """Write a checkpoint's weights as one file of safetensors.

    Args:
        path: as for :func:`~scalerun.checkpoint.reader.find_checkpoint`.
        part: ``model`` or ``ema``.
        dtype: number format, or None for those of the checkpoint.

    Returns:
        Numbers of tensors and of bytes.

    Raises:
        UserError: there is no whole checkpoint, or the file cannot be written.
    """
    checkpoint = find_checkpoint(path, "PATH")
    settings = model_settings(checkpoint)
    twice = ties(settings)
    entries = weight_entries(checkpoint, part=part, dtype=dtype, ties=twice)
    metadata = _origin(checkpoint, part) | {"architecture": json.dumps(settings)} | twice
    return len(entries), write_safetensors(output, entries, metadata)


@plugin_errors()
def torchscale_file(
    path: str, output: Path, fields_file: Path, *, part: str, user_dir: str | None
) -> tuple[int, int]:
    """Write a state dict in TorchScale's names, and TorchScale's configuration as JSON.

    Arguments, results and errors as in :func:`consolidated`.

    Raises:
        UserError: TorchScale has no form for the model.
    """
    checkpoint = find_checkpoint(path, "PATH")
    cfg = stored_config(checkpoint, user_dir).model
    fields, version = torchscale_fields(cfg)
    weights = {entry.name: entry for entry in weight_entries(checkpoint, part=part)}
    templates = {name: entry.template for name, entry in weights.items()}
    slices = _Slices(weights)
    entries = [slices.entry(piece) for piece in torchscale_pieces(cfg, templates)]
    entries += [
        Entry(key, table, partial(_itself, table)) for key, table in torchscale_tables(cfg).items()
    ]
    metadata = _origin(checkpoint, part) | {"torchscale_version": version}
    size = write_safetensors(output, entries, metadata)
    replace_file(fields_file, (json.dumps(fields, indent=1) + "\n").encode())
    logger.info("%s: fields for TorchScale %s", fields_file, version)
    return len(entries), size


def model_settings(checkpoint: Path) -> dict[str, Any]:
    """The architecture's settings as the run stored them; no plug-in is needed for that."""
    content = json.loads(run_file(checkpoint, CONFIG_FILE).read_text(encoding="utf-8"))
    settings: dict[str, Any] = content["model"]
    return settings


def ties(settings: Mapping[str, Any]) -> dict[str, str]:
    """Copy -> original, of tensors that a model of these settings lists under two names."""
    if not settings.get("share_all_embeddings"):
        return {}
    return {"decoder.embedding.tokens.weight": "encoder.embedding.tokens.weight"}


def _origin(checkpoint: Path, part: str) -> dict[str, str]:
    return {
        "scalerun_version": __version__,
        "num_updates": str(read_manifest(checkpoint).num_updates),
        "part": part,
    }


class _Slices:
    """Reads stacked experts once for all of them."""

    def __init__(self, weights: Mapping[str, Entry]) -> None:
        self.weights = weights
        self.last: tuple[str, Tensor] | None = None

    def entry(self, piece: Piece) -> Entry:
        """The entry of one piece."""
        template = self.weights[piece.source].template
        if piece.expert is not None:
            template = template[piece.expert]
        return Entry(piece.key, template, partial(self.read, piece))

    def read(self, piece: Piece) -> Tensor:
        """The tensor of one piece."""
        if piece.expert is None:
            self.last = None
            return self.weights[piece.source].read()
        if self.last is None or self.last[0] != piece.source:
            self.last = None
            self.last = (piece.source, self.weights[piece.source].read())
        return self.last[1][piece.expert]


def _itself(table: Tensor) -> Tensor:
    return table
