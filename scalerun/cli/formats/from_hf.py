"""Models of the transformers library become runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerun.checkpoint.atomic import hash_file
from scalerun.cli.convert_config import ConvertConfig
from scalerun.cli.converted_run import ConvertedModel, report_run, write_run
from scalerun.cli.formats.vocabulary import find_vocabulary
from scalerun.dataclass.errors import UserError
from scalerun.models.hf.family import Family
from scalerun.models.hf.folder import CONFIG_FILE, read_config, read_weights, weight_files
from scalerun.models.hf.gpt2 import GPT2
from scalerun.models.hf.opt import OPT
from scalerun.models.hf.parity import same_logits, source_logits
from scalerun.models.weight_file import refuse_not_finite

logger = logging.getLogger(__name__)

FAMILIES = {family.model_type: family for family in (OPT, GPT2)}


def from_hf(cfg: ConvertConfig, words: list[str]) -> int:
    """Convert a folder; return the exit code.

    Args:
        cfg: the command's settings.
        words: its arguments.

    Raises:
        UserError: the folder cannot be converted.
    """
    folder = Path(cfg.source)
    config = read_config(folder)
    family = find_family(folder, config)
    fields = family.complete(config, str(folder / CONFIG_FILE))
    files = weight_files(folder)
    state = read_weights(folder, family.unused)
    refuse_not_finite(folder, state)
    translation = family.translate(fields, state, str(files[0] if len(files) == 1 else folder))
    vocabulary = find_vocabulary(
        cfg, [folder], num_rows=translation.vocab_size, begin=begin_symbol(fields)
    )
    source = {
        "library": "transformers",
        "model_type": family.model_type,
        "files": {file.name: hash_file(file) for file in [folder / CONFIG_FILE, *files]},
        "fields": fields,
    }
    converted = ConvertedModel.of(translation, source)
    gate = same_logits(
        translation.vocab_size,
        lambda tokens_BT: source_logits(folder, family, fields, state, tokens_BT),
        str(folder),
    )
    checkpoint = write_run(
        converted, Path(cfg.output), vocabulary=vocabulary, words=words, gate=gate
    )
    report_run(checkpoint, converted)
    return 0


def find_family(folder: Path, config: Mapping[str, Any]) -> Family:
    """The tables of a model.

    Raises:
        UserError: there are none for its ``model_type``.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise UserError(
            f"{folder / CONFIG_FILE} has model_type {config.get('model_type')!r}; models of type "
            f"{' and '.join(FAMILIES)} can be converted"
        )
    return family


def begin_symbol(fields: Mapping[str, Any]) -> int | None:
    """The symbol between texts, which also begins the first."""
    begin, end = fields["bos_token_id"], fields["eos_token_id"]
    if None not in (begin, end) and begin != end:
        logger.warning(
            "config.json begins a text with symbol %d and ends it with %d; here the one that ends "
            "a text also begins it",
            begin,
            end,
        )
    symbol: int | None = begin if end is None else end
    return symbol
