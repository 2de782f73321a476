"""Convert weights of TorchScale: ``python -m scalerun.cli.convert --from torchscale FILE …``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from scalerun.checkpoint.atomic import hash_file
from scalerun.cli.entry import run_cli
from scalerun.cli.output_file import refuse_full_folder
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.data.tokenizers.fairseq_dictionary import rows_in_our_order
from scalerun.data.tokenizers.tokenizer import load_tokenizer
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.parser import parse_config
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.dataclass.yaml_config import read_yaml
from scalerun.logging.console import setup_logging
from scalerun.models.torchscale.expert_files import read_checkpoint
from scalerun.models.torchscale.facts import EMBEDDING
from scalerun.models.torchscale.recognition import Recognized, recognize
from scalerun.models.torchscale.settling import Settled, settle, yaml_word
from scalerun.models.torchscale.weight_file import WeightFile

logger = logging.getLogger("scalerun.cli.convert")  # also when run as __main__

DECODERS = ("decoder", "retnet")
WITH_TASKS = ("mlm", "encoder_decoder")
VOCABULARY_TABLES = ("embed_tokens.weight", "output_projection.weight")


@dataclass
class ConvertConfig(ScalerunDataclass):
    """What ``scalerun.cli.convert`` can be told."""

    path: str = option("", "state dict or fairseq checkpoint to convert", positional=True)
    from_: str | None = option(None, "the library that made it", choices=("torchscale",))
    output: str = option("", "run folder to write; must be empty or new")
    torchscale_config: str | None = option(
        None, "YAML or JSON file of TorchScale's fields (default: those that fairseq recorded)"
    )
    torchscale_version: str | None = option(
        None, "TorchScale's version, where it matters", choices=("main", "0.3.0")
    )
    tokenizer: str | None = option(
        None, "tokenizer of a decoder: bytes, a sentencepiece .model or a tokenizers .json file"
    )
    dict_: str | None = option(
        None, "fairseq's dict.txt, whose order the rows of the embedding have"
    )
    vocabulary: str | None = option(
        None,
        "folder of the binarised pairs that an encoder-decoder was trained on, with the dict.txt "
        "of each language",
    )
    source_lang: str | None = option(
        None, "its source (default: as the names of the folder's files say)", aliases=("-s",)
    )
    target_lang: str | None = option(None, "its target, with --source-lang", aliases=("-t",))
    allow_namespace: bool = option(
        False, "read the argparse.Namespace of an old fairseq checkpoint, as plain values"
    )

    def validate(self) -> None:
        if not self.path:
            raise ConfigError("the file to convert is missing: give it as the first argument")
        if self.from_ is None:
            raise ConfigError("--from is required: the library that made the file (torchscale)")
        if not self.output:
            raise ConfigError("--output is required: the run folder to write")
        if (self.source_lang is None) != (self.target_lang is None):
            raise ConfigError("--source-lang and --target-lang are given together")
        if self.source_lang is not None and self.vocabulary is None:
            raise ConfigError("--source-lang and --target-lang belong to --vocabulary")
        if self.dict_ is not None and self.tokenizer is None:
            raise ConfigError("--dict needs the sentencepiece model that it lists: --tokenizer")


def main(argv: Sequence[str] | None = None) -> int:
    """Convert one file; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    cfg = parse_config(ConvertConfig, words, prog="scalerun-convert")
    setup_logging()
    output = Path(cfg.output)
    refuse_full_folder("--output", output)
    file = read_checkpoint(Path(cfg.path), allow_namespace=cfg.allow_namespace)
    given = given_fields(cfg, file)
    found = recognize(file.state, given)
    refuse_not_finite(Path(cfg.path), found)
    report_file(file, found)
    found = with_vocabulary(cfg, found)
    settled = settle(
        found,
        given,
        complete=cfg.torchscale_config is None and file.record is not None,
        version=cfg.torchscale_version,
    )
    report_assumed(settled)
    # Only now, so that --help need not wait for torch's distributed packages.
    from scalerun.cli.converted_run import ConvertedModel, write_run

    translation = settled.translation
    converted = ConvertedModel(
        model=translation.build(),
        cfg=translation.cfg,
        arch=translation.arch,
        vocab_size=translation.vocab_size,
        source=source_of(Path(cfg.path), settled),
        source_vocab_size=translation.source_vocab_size,
    )
    task = with_task(cfg, found, converted.model.max_positions())
    checkpoint = write_run(
        converted,
        output,
        tokenizer=cfg.tokenizer if found.kind in DECODERS else None,
        task=task,
        words=words,
    )
    num_params = sum(parameter.numel() for parameter in converted.model.parameters())
    logger.info(
        "%s: %s, %s parameters; read back, its logits are the same",
        checkpoint,
        converted.arch,
        f"{num_params:,}",
    )
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


def refuse_not_finite(path: Path, found: Recognized) -> None:
    """Refuse weights that nothing can be computed with.

    Raises:
        UserError: names the first that has an infinite value or NaN.
    """
    for name, tensor in found.state.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{path} holds values that are not finite: {name}")


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
    # Only now, so that --help need not wait for torch's distributed packages.
    from scalerun.cli.converted_task import VocabularyFlags, task_settings

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


def cli_main() -> None:
    """Entry point of ``scalerun-convert``."""
    run_cli(main)


if __name__ == "__main__":
    cli_main()
