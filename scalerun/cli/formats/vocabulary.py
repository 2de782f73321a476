"""The tokenizer that lies beside a model of another library, as settings of a task."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalerun.cli.convert_config import ConvertConfig
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.data.tokenizers.tokenizer import load_tokenizer
from scalerun.dataclass.errors import ConfigError, UserError

logger = logging.getLogger(__name__)

TOKENIZER_FILES: tuple[dict[str, str], ...] = (
    {"tokenizer": "tokenizer.json"},
    {"vocab_filename": "vocab.json", "merges_filename": "merges.txt"},
    {"tokenizer": "tokenizer.model"},
)
"""Files that are looked for, the first ones first, by the settings that name them."""


def find_vocabulary(
    cfg: ConvertConfig, folders: Sequence[Path], *, num_rows: int, begin: int | None
) -> dict[str, Any] | None:
    """Settings that name the tokenizer; None, with a warning, where there is none.

    Args:
        cfg: its flags count before files that are found.
        folders: where files may lie.
        num_rows: rows of the embedding.
        begin: the symbol that a text began with when the model was trained; None if unknown.

    Raises:
        UserError: the tokenizer does not fit the model.
    """
    found = _named(cfg) or _lying_in(folders)
    if found is None:
        logger.warning(
            "no tokenizer is named or lies beside the weights: the run cannot be prompted or "
            "scored; give --tokenizer, or --vocab-filename and --merges-filename"
        )
        return None
    tokenizer = _load(found)
    if begin is not None and begin != tokenizer.dictionary.eos:
        found["end_of_document_symbol"] = _symbol(tokenizer, begin)
        try:
            tokenizer = _load(found)
        except ConfigError as error:
            raise UserError(
                f"texts begin with symbol {begin}, and in {_name(found)} that cannot be the symbol "
                "between documents; give the tokenizer that the model was trained with"
            ) from error
    dictionary = tokenizer.dictionary
    num_symbols = dictionary.num_real_symbols - dictionary.adds_pad
    if num_symbols > num_rows:
        raise UserError(
            f"the embedding has {num_rows} rows, and the tokenizer {_name(found)} has "
            f"{num_symbols} symbols; give the one that the model was trained with"
        )
    if len(dictionary) != num_rows:
        found["final_vocab_size"] = num_rows
    return found


def _named(cfg: ConvertConfig) -> dict[str, Any] | None:
    names = ("tokenizer", "vocab_filename", "merges_filename")
    given = {name: getattr(cfg, name) for name in names if getattr(cfg, name) is not None}
    return given or None


def _lying_in(folders: Sequence[Path]) -> dict[str, Any] | None:
    for folder in folders:
        for files in TOKENIZER_FILES:
            if all((folder / name).is_file() for name in files.values()):
                return {setting: str(folder / name) for setting, name in files.items()}
    return None


def _load(found: dict[str, Any]) -> BaseTokenizer:
    names = ("tokenizer", "vocab_filename", "merges_filename", "end_of_document_symbol")
    spec, vocab, merges, end = (found.get(name) for name in names)
    return load_tokenizer(spec, vocab, merges, end)


def _symbol(tokenizer: BaseTokenizer, index: int) -> str:
    if not 0 <= index < tokenizer.dictionary.num_real_symbols - tokenizer.dictionary.adds_pad:
        raise UserError(
            f"texts begin with symbol {index}, which the tokenizer does not have; give the "
            "tokenizer that the model was trained with"
        )
    return tokenizer.piece(index)


def _name(found: dict[str, Any]) -> str:
    return str(found.get("tokenizer") or found["vocab_filename"])
