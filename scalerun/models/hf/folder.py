"""A folder of the transformers library: its configuration and its weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.weight_file import float_tensors, read_content

CONFIG_FILE = "config.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Of one file; an index beside it, with this name and more, lists several."""
INDEX = ".index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """The settings of a model.

    Raises:
        UserError: there is no such folder, or its ``config.json`` cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give one with {CONFIG_FILE} and the weights")
    return read_json(folder / CONFIG_FILE)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        UserError: it is missing, or holds something else.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a folder that the library saved")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__} and no object of settings")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a model, all of which are there.

    Raises:
        UserError: there are none, or an index names one that is missing.
    """
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}{INDEX}"
        if not index.is_file():
            continue
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise UserError(f"{index} has no weight_map, which lists the files of the weights")
        files = [folder / str(each) for each in sorted({str(file) for file in listed.values()})]
        for file in files:
            if not file.is_file():
                raise UserError(f"{index} names {file.name}, which is not beside it")
        return files
    raise UserError(f"{folder} has no weights: neither {' nor '.join(WEIGHT_FILES)}")


def read_weights(folder: Path, unused: str) -> dict[str, Tensor]:
    """All weights of a model by their keys; nothing that a file holds is executed.

    Args:
        unused: a pattern of keys to leave out.

    Raises:
        UserError: a file is missing, damaged or holds more than weights, or two have one key.
    """
    state: dict[str, Tensor] = {}
    for file in weight_files(folder):
        content = read_content(file)
        kept = {key: t for key, t in content.items() if not re.fullmatch(unused, str(key))}
        found = float_tensors(file, kept)
        twice = sorted(state.keys() & found.keys())
        if twice:
            raise UserError(f"{file} has {twice[0]}, which another file of the folder has too")
        state |= found
    return state
