"""Segments: what is to be translated, a line each, and what it is compared with."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from scalerun.cli.interactive_cli import piped_prompts
from scalerun.data.parallel.parallel_layout import find_pair
from scalerun.data.text.layout import data_folder
from scalerun.dataclass.errors import UserError
from scalerun.tasks.translation import TranslationConfig

STANDARD_INPUT = "-"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Segments:
    """Sources in their order."""

    name: str
    """Where they come from, for messages."""
    sources: list[str]
    references: list[str] | None
    """One for each source; None where nobody has translated them."""


def read_segments(
    cfg: TranslationConfig, subset: str, source: str | None, reference: str | None
) -> Segments:
    """The lines of a set, or of a file of one's own.

    Args:
        cfg: says where the data is and which languages it has.
        subset: of the data; its file of references may be missing.
        source: a file in place of the set, or :data:`STANDARD_INPUT`.
        reference: file that belongs to ``source``.

    Raises:
        UserError: a file is missing or no text, or source and reference differ in length.
    """
    if source is not None:
        name, target = source, None if reference is None else Path(reference)
        if source == STANDARD_INPUT:
            name = "standard input"
            sources = list(piped_prompts(sys.stdin.buffer))
        else:
            sources = _lines(Path(source), "--input")
    else:
        path, target = _files(cfg, subset)
        name, sources = str(path), _lines(path, "--gen-subset")
    references = None if target is None else _lines(target, "--reference")
    if references is not None and len(references) != len(sources):
        raise UserError(
            f"{name} has {len(sources)} lines and {target} has {len(references)}; line n of one "
            "has to be the translation of line n of the other"
        )
    return Segments(name, sources, references)


def _files(cfg: TranslationConfig, subset: str) -> tuple[Path, Path | None]:
    """The files of a set's sources and references."""
    assert cfg.source_lang is not None
    assert cfg.target_lang is not None
    folder = data_folder(cfg.data)
    path, target = (folder / f"{subset}.{lang}" for lang in (cfg.source_lang, cfg.target_lang))
    if path.is_file() and not target.exists():
        logger.info("there is no %s to compare with, so nothing will be scored", target)
        return path, None
    pair = find_pair(cfg.data, subset, source_lang=cfg.source_lang, target_lang=cfg.target_lang)
    return pair[0].path, pair[1].path


def _lines(path: Path, flag: str) -> list[str]:
    if not path.is_file():
        raise UserError(f"{flag} {path} is no file; name a text file with a segment on each line")
    with path.open("rb") as file:
        return list(piped_prompts(file, str(path)))
