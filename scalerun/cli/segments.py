"""Segments: what is to be translated, a line or an item each, and what it is compared with."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from scalerun.cli.session import piped_prompts
from scalerun.data.parallel.binarised_pairs import PairFolder
from scalerun.data.parallel.parallel_layout import find_pair
from scalerun.data.parallel.side import check_numbers
from scalerun.data.text.layout import data_folder
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.data.tokenizers.joined_pieces import reference_text
from scalerun.dataclass.errors import UserError
from scalerun.tasks.translation import TranslationTask
from scalerun.tasks.translation_config import TranslationConfig

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
    tokens: list[list[int]] | None = None
    """Of each source, with the end symbol; None where they are only text."""

    def source_tokens(self, tokenizer: BaseTokenizer) -> list[list[int]]:
        """The tokens of each source, with the end symbol; none for a blank one."""
        if self.tokens is not None:
            return [tokens if len(tokens) > 1 else [] for tokens in self.tokens]
        end = tokenizer.dictionary.eos
        return [[*tokenizer.encode(text), end] if text.strip() else [] for text in self.sources]


def read_segments(
    task: TranslationTask, subset: str, source: str | None, reference: str | None
) -> Segments:
    """The lines of a set, or of a file of one's own.

    Args:
        task: says where the data is, which languages it has, and what tokens mean.
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
    elif (pairs := task.cfg.pairs()) is not None:
        return _binarised(task, pairs, subset)
    else:
        path, target = _files(task.cfg, subset)
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
    source_lang, target_lang = cfg.languages
    folder = data_folder(cfg.data)
    path, target = (folder / f"{subset}.{lang}" for lang in cfg.languages)
    if path.is_file() and not target.exists():
        logger.info("there is no %s to compare with, so nothing will be scored", target)
        return path, None
    pair = find_pair(cfg.data, subset, source_lang=source_lang, target_lang=target_lang)
    return pair[0].path, pair[1].path


def _binarised(task: TranslationTask, pairs: PairFolder, subset: str) -> Segments:
    """The items of a set of binarised pairs; the side of its references may be missing."""
    has_target = pairs.has_side(subset, pairs.target_lang)
    if not has_target and pairs.has_side(subset, pairs.source_lang):
        logger.info(
            "%s has no %s in %s to compare with, so nothing will be scored",
            pairs.folder, subset, pairs.target_lang,
        )  # fmt: skip
        [source] = task.binarised_sides(pairs, subset, whole=False, with_target=False)
        references = None
    else:
        source, target = task.binarised_sides(pairs, subset, whole=False)
        check_numbers(source, target)
        references = [reference_text(task.tokenizer, ids[:-1]) for ids in target.all_tokens()]
    tokens = source.all_tokens()
    sources = [task.source_tokenizer.decode(ids[:-1]) for ids in tokens]
    return Segments(str(source.path), sources, references, tokens)


def _lines(path: Path, flag: str) -> list[str]:
    if not path.is_file():
        raise UserError(f"{flag} {path} is no file; name a text file with a segment on each line")
    with path.open("rb") as file:
        return list(piped_prompts(file, str(path)))
