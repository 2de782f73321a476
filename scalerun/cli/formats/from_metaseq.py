"""Checkpoints of metaseq become runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from scalerun.checkpoint.atomic import hash_file
from scalerun.cli.convert_config import ConvertConfig
from scalerun.cli.converted_run import ConvertedModel, report_run, write_run
from scalerun.cli.formats.vocabulary import find_vocabulary
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.yaml_config import read_yaml
from scalerun.models.hf.family import ACTIVATIONS
from scalerun.models.hf.opt import OPT
from scalerun.models.hf.parity import same_logits
from scalerun.models.hf.reference import opt_logits
from scalerun.models.metaseq.files import MetaseqFile, find_files, read_file
from scalerun.models.metaseq.keys import joined_parts, opt_config, opt_state, separated
from scalerun.models.metaseq.shards import whole_state
from scalerun.models.weight_file import refuse_not_finite

END_SYMBOL = 2
"""``</s>`` in every vocabulary of metaseq: it separates texts, and begins them."""


def from_metaseq(cfg: ConvertConfig, words: list[str]) -> int:
    """Convert a checkpoint of one or several files; return the exit code.

    Args:
        cfg: the command's settings.
        words: its arguments.

    Raises:
        UserError: the checkpoint cannot be converted.
    """
    path = Path(cfg.source)
    paths = find_files(path)
    files = [[read_file(p, allow_namespace=cfg.allow_namespace) for p in row] for row in paths]
    state = joined_parts([separated(whole_state(row)) for row in files])
    refuse_not_finite(path, state)
    record, origin = settings_of(cfg, files)
    fields = OPT.complete(opt_config(record, state, origin), origin)
    theirs = opt_state(state)
    translation = OPT.translate(fields, theirs, str(path))
    vocabulary = find_vocabulary(
        cfg, [path.parent], num_rows=translation.vocab_size, begin=END_SYMBOL
    )
    source = {
        "library": "metaseq",
        "files": {each.name: hash_file(each) for row in paths for each in row},
        "fields": fields,
    }
    converted = ConvertedModel.of(translation, source)
    gate = same_logits(
        translation.vocab_size,
        lambda tokens_BT: source_logits(fields, theirs, tokens_BT),
        str(path),
    )
    checkpoint = write_run(
        converted, Path(cfg.output), vocabulary=vocabulary, words=words, gate=gate
    )
    report_run(checkpoint, converted)
    return 0


def source_logits(
    fields: Mapping[str, Any], state: Mapping[str, Tensor], tokens_BT: Tensor
) -> Tensor:
    """(B, T, V) by OPT's formula."""
    return opt_logits(fields, state, tokens_BT, ACTIVATIONS[fields["activation_function"]])


def settings_of(
    cfg: ConvertConfig, files: Sequence[Sequence[MetaseqFile]]
) -> tuple[Mapping[str, Any], str]:
    """Metaseq's settings of the model, and what they come from.

    Raises:
        UserError: nothing says them.
    """
    if cfg.metaseq_config is not None:
        content = OmegaConf.to_container(
            read_yaml(Path(cfg.metaseq_config), "--metaseq-config"), resolve=False
        )
        assert isinstance(content, dict)
        return {str(name): value for name, value in content.items()}, cfg.metaseq_config
    first = files[0][0]
    if first.record is None:
        raise UserError(
            f"{first.path} records no settings of the model (cfg.model); name "
            "decoder_attention_heads and activation_fn in a YAML or JSON file for --metaseq-config"
        )
    return first.record, str(first.path)
