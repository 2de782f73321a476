"""Runs become folders of the transformers library."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalerun import __version__
from scalerun.checkpoint.reader import find_checkpoint
from scalerun.checkpoint.safetensors_file import Entry, write_safetensors
from scalerun.cli.convert_config import ConvertConfig
from scalerun.cli.inference import CPU, load_for_inference, load_model, stored_config
from scalerun.data.tokenizer_export import export_tokenizer
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.dataclass.errors import UserError
from scalerun.models.base_model import BaseModel
from scalerun.models.hf.custom import MODELLING_FILE, custom_fields
from scalerun.models.hf.folder import CONFIG_FILE, read_weights
from scalerun.models.hf.opt import OPT, RENAMES, opt_fields
from scalerun.models.hf.parity import check_logits, custom_logits, random_tokens, source_logits
from scalerun.models.transformer_config import TransformerConfig

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
GENERATION_FILE = "generation_config.json"


def to_hf(cfg: ConvertConfig, words: list[str]) -> int:
    """Convert a checkpoint; return the exit code.

    Args:
        cfg: the command's settings.
        words: its arguments.

    Raises:
        UserError: the library has no form for the model, or computes something else with it.
    """
    model, settings, tokenizer = load_source(cfg)
    fields, names = written_form(settings, model)
    output = Path(cfg.output)
    # Not under its own name before the gate has been passed.
    building = output.parent / f"{output.name}.building"
    if building.exists():
        raise UserError(f"{building} is left over from a conversion that was killed; remove it")
    building.mkdir(parents=True)
    try:
        write_folder(building, model, fields, names, tokenizer)
        difference = compare_written(building, model, fields)
        building.replace(output)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    logger.info(
        "%s: %s; logits differ by at most %.2g", output, fields["architectures"][0], difference
    )
    return 0


def load_source(cfg: ConvertConfig) -> tuple[BaseModel, Any, BaseTokenizer | None]:
    """The model, its settings and its tokenizer, if the run has one."""
    checkpoint = find_checkpoint(Path(cfg.source), "the input")
    stored = stored_config(checkpoint, None)
    if stored.task is None and not cfg.use_ema:
        return load_model(checkpoint), stored.model, None
    run = load_for_inference(str(checkpoint), device=CPU, use_ema=cfg.use_ema)
    return run.model, run.cfg.model, run.task.tokenizer


def written_form(settings: Any, model: BaseModel) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields of ``config.json``, and our name -> the key of each weight."""
    state = model.state_dict()
    own = {name: name for name in state}
    if type(settings) is not TransformerConfig:
        table = state.get("embedding.tokens.weight")
        return custom_fields(settings, 0 if table is None else table.shape[0]), own
    vocab_size = state["embedding.tokens.weight"].shape[0]
    fields = opt_fields(settings, vocab_size)
    if fields is None:
        return custom_fields(settings, vocab_size), own
    fields |= {"model_type": OPT.model_type, "architectures": ["OPTForCausalLM"]}
    keys = {name: RENAMES.theirs(name) for name in state}
    return fields, {name: key for name, key in keys.items() if key is not None}


def write_folder(
    folder: Path,
    model: BaseModel,
    fields: dict[str, Any],
    names: Mapping[str, str],
    tokenizer: BaseTokenizer | None,
) -> None:
    """Write weights, settings, tokenizer, and the modelling file where one is needed."""
    state = model.state_dict()
    entries = [
        Entry(key, state[name], partial(_itself, state[name])) for name, key in names.items()
    ]
    write_safetensors(folder / WEIGHTS_FILE, entries, {"format": "pt"})
    symbols: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if tokenizer is not None:
        dictionary = tokenizer.dictionary
        symbols = {"bos_token_id": dictionary.eos, "eos_token_id": dictionary.eos}
        symbols |= {"pad_token_id": dictionary.pad}
        never = set(dictionary.dropped_ids) - {dictionary.eos}
        never |= set() if dictionary.unk is None else {dictionary.unk}
        generation = symbols | {"suppress_tokens": sorted(never)}
        if "auto_map" in fields:
            generation |= {"use_cache": False}
        _write_json(folder / GENERATION_FILE, {k: v for k, v in generation.items() if v != []})
        if not export_tokenizer(tokenizer, folder, max_length=model.max_positions()):
            copied = ", ".join(tokenizer.files) or "no file"
            for name, path in tokenizer.files.items():
                shutil.copyfile(path, folder / name)
            logger.warning(
                "transformers cannot read this kind of tokenizer; its own files lie in the folder "
                "(%s)",
                copied,
            )
    _write_json(
        folder / CONFIG_FILE,
        fields | symbols | {"dtype": "float32", "scalerun_version": __version__},
    )
    if "auto_map" in fields:
        shutil.copyfile(MODELLING_FILE, folder / MODELLING_FILE.name)


@torch.no_grad()
def compare_written(folder: Path, model: BaseModel, fields: Mapping[str, Any]) -> float:
    """The largest difference of logits between the model and the folder, which is read again.

    Raises:
        UserError: it is too large.
    """
    tokens_BT = random_tokens(fields["vocab_size"], model.max_positions())
    if "auto_map" in fields:
        written = custom_logits(folder, tokens_BT)
    else:
        complete = OPT.complete(fields, CONFIG_FILE)
        written = source_logits(folder, OPT, complete, read_weights(folder, OPT.unused), tokens_BT)
    return check_logits(written, model(tokens_BT).logits, "the converted folder")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _itself(tensor: Tensor) -> Tensor:
    return tensor
