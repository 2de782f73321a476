"""Weights of TorchScale become a run."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from scalerun.checkpoint.atomic import hash_file
from scalerun.cli.convert_config import ConvertConfig
from scalerun.cli.converted_run import ConvertedModel, report_run, write_run
from scalerun.cli.converted_task import VocabularyFlags, task_settings
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.data.tokenizers.fairseq_dictionary import rows_in_our_order
from scalerun.data.tokenizers.tokenizer import load_tokenizer
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.dataclass.yaml_config import read_yaml
from scalerun.models.torchscale.expert_files import read_checkpoint
from scalerun.models.torchscale.facts import EMBEDDING
from scalerun.models.torchscale.recognition import Recognized, recognize
from scalerun.models.torchscale.settling import Settled, settle, yaml_word
from scalerun.models.weight_file import WeightFile, refuse_not_finite

logger = logging.getLogger(__name__)

DECODERS = ("decoder", "retnet")
WITH_TASKS = ("mlm", "encoder_decoder")
VOCABULARY_TABLES = ("embed_tokens.weight", "output_projection.weight")


def from_torchscale(cfg: ConvertConfig, words: list[str]) -> int:
    """Convert one file; return the exit code.

    Args:
        cfg: the command's settings.
        words: its arguments.

    Raises:
        UserError: the file cannot be converted.
    """
    output = Path(cfg.output)
    file = read_checkpoint(Path(cfg.source), allow_namespace=cfg.allow_namespace)
    given = given_fields(cfg, file)
    found = recognize(file.state, given)
    refuse_not_finite(Path(cfg.source), found.state)
    report_file(file, found)
    found = with_vocabulary(cfg, found)
    settled = settle(
        found,
        given,
        complete=cfg.torchscale_config is None and file.record is not None,
        version=cfg.torchscale_version,
    )
    report_assumed(settled)
    translation = settled.translation
    converted = ConvertedModel.of(translation, source_of(Path(cfg.source), settled))
    is_prompted = cfg.tokenizer is not None and found.kind in DECODERS
    checkpoint = write_run(
        converted,
        output,
        vocabulary={"tokenizer": cfg.tokenizer} if is_prompted else None,
        task=with_task(cfg, found, converted.model.max_positions()),
        words=words,
    )
    report_run(checkpoint, converted)
    return 0


def given_fields(cfg: ConvertConfig, file: WeightFile) -> dict[str, Any]:
    """TorchScale's fields, from the user's file or else from the checkpoint."""
    if cfg.torchscale_config is None:
        return file.record or {}
    path = Path(cfg.torchscale_config)
    content = read_yaml(path, "--torchscale-config")
    fields = OmegaConf.to_container(content, resolve=False)
    assert isinstance(fields, dict)
    return {str(name): value for name, value in fields.items()}


def report_file(file: WeightFile, found: Recognized) -> None:
    """Say what is not taken over as it is."""
    kinds = {str(t.dtype).removeprefix("torch.") for t in file.state.values()} - {"float32"}
    if kinds:
        logger.info("weights in %s become float32", ", ".join(sorted(kinds)))
    if found.left_out:
        names = ", ".join(found.left_out[:5])
        logger.warning(
            "%d tensors around the model are left out: %s%s",
            len(found.left_out),
            names,
            " …" if len(found.left_out) > 5 else "",
        )


def report_assumed(settled: Settled) -> None:
    """Say which settings a record left open."""
    if settled.assumed:
        logger.info(
            "the file's record does not say, so TorchScale's defaults are taken: %s",
            ", ".join(f"{name}: {yaml_word(value)}" for name, value in settled.assumed.items()),
        )


def with_vocabulary(cfg: ConvertConfig, found: Recognized) -> Recognized:
    """The state dict with its rows in the order of the tokenizer's ids.

    Raises:
        UserError: the tokenizer does not fit, or such a model has no use for one.
    """
    if cfg.tokenizer is None or found.kind in WITH_TASKS:
        return found
    if found.kind not in DECODERS:
        raise UserError(
            "--tokenizer makes a run of a decoder, or of a masked language model, and the weights "
            f"are of another kind ({found.kind.replace('_', '-')}); leave --tokenizer out"
        )
    tokenizer = load_tokenizer(cfg.tokenizer)
    num_rows = found.num_rows
    if cfg.dict_ is None:
        check_vocabulary(tokenizer, cfg.tokenizer, num_rows)
        return found
    order = torch.tensor(rows_in_our_order(Path(cfg.dict_), tokenizer, num_rows))
    state = {k: t[order] if k in VOCABULARY_TABLES else t for k, t in found.state.items()}
    return replace(found, state=state, sides={"decoder": state})


def with_task(
    cfg: ConvertConfig, found: Recognized, positions: int | None
) -> ScalerunDataclass | None:
    """The task of an encoder or encoder-decoder whose vocabulary is given; else None.

    Raises:
        UserError: the vocabulary does not fit, or is that of another kind of model.
    """
    if found.kind not in WITH_TASKS:
        if cfg.vocabulary is not None:
            raise UserError(
                "--vocabulary makes a run of an encoder-decoder, and the weights are of another "
                f"kind ({found.kind.replace('_', '-')}); leave it out"
            )
        return None
    flags = VocabularyFlags(
        cfg.tokenizer, cfg.dict_, cfg.vocabulary, cfg.source_lang, cfg.target_lang
    )
    rows = {side: state[EMBEDDING].shape[0] for side, state in found.sides.items()}
    return task_settings(found.kind, flags, rows=rows, positions=positions)


def check_vocabulary(tokenizer: BaseTokenizer, spec: str, num_rows: int) -> None:
    """Refuse a tokenizer of another size than the embedding.

    Args:
        spec: how the user named it.

    Raises:
        UserError: the sizes differ.
    """
    dictionary = tokenizer.dictionary
    if len(dictionary) != num_rows:
        raise UserError(
            f"the embedding has {num_rows} rows, but --tokenizer {spec} has "
            f"{dictionary.num_real_symbols} symbols and asks for {len(dictionary)} rows; give the "
            "tokenizer that the model was trained with, or leave --tokenizer out"
        )


def source_of(path: Path, settled: Settled) -> dict[str, Any]:
    """Where the weights come from, to be kept beside them."""
    return {
        "library": "torchscale",
        "versions": list(settled.versions),
        "file": path.name,
        "sha256": hash_file(path),
        "fields": asdict(settled.config),
    }
