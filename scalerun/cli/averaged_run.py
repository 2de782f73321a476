"""The mean of checkpoints becomes a run folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalerun.checkpoint.atomic import hash_file
from scalerun.checkpoint.averaging import check_same_tensors, newest_checkpoints, write_mean
from scalerun.checkpoint.manifest import MANIFEST, read_manifest
from scalerun.checkpoint.reader import find_checkpoint, read_state, run_file
from scalerun.cli.inference import ASSETS_FOLDER, CONFIG_FILE, stored_config
from scalerun.cli.run_folder import RunFolder
from scalerun.dataclass.configs import CheckpointConfig, ScalerunConfig
from scalerun.dataclass.errors import UserError
from scalerun.models.base_model import Architecture
from scalerun.plugins import plugin_errors
from scalerun.trainer import Progress

logger = logging.getLogger(__name__)

SOURCE_FILE = "averaged_from.json"
KEPT = ("architecture", "criterion", "task")
"""Parts that a mean has in common with what it is made of."""


@plugin_errors()
def average_runs(
    paths: Sequence[str], output: Path, *, last: int | None, user_dir: str | None, words: list[str]
) -> tuple[Path, list[Path]]:
    """Write the mean of checkpoints into a new run folder.

    It has the weights and what they depend on: settings, vocabulary, tokenizer; of the checkpoint
    with the most updates, whose number it gets. There is no optimizer, no schedule, no place in
    the data.

    Args:
        paths: as for :func:`~scalerun.checkpoint.reader.find_checkpoint`; with ``last`` one run.
        output: a folder that is empty or not there.
        last: how many of the run's newest checkpoints to take.
        user_dir: plug-in folder in place of the one that the runs used.
        words: the command's arguments.

    Returns:
        The new checkpoint, and those that it is the mean of.

    Raises:
        UserError: one is missing or damaged, they differ in function or vocabulary, or the folder
            cannot be written.
    """
    named = list(paths) if last is None else newest_checkpoints(Path(paths[0]), last)
    folders = [find_checkpoint(path, "PATH") for path in named]
    _refuse_twice(folders)
    updates = [read_manifest(folder).num_updates for folder in folders]
    newest = folders[max(range(len(folders)), key=lambda i: updates[i])]
    cfg = stored_config(newest, user_dir)
    for folder in folders:
        if folder != newest:
            _check_same_function(cfg, newest, folder)
            _check_same_vocabulary(newest, folder)
    check_same_tensors([newest, *(folder for folder in folders if folder != newest)])
    cfg.checkpoint = CheckpointConfig()  # else a training with these settings would write there
    with RunFolder(output, flag="--output") as run:
        checkpoint = write_mean(
            output,
            max(updates),
            folders,
            plain=_plain(read_state(newest), max(updates)),
            run_files=_run_files(newest, folders, updates),
        )
        run.write_description(cfg, words, command="scalerun.cli.checkpoint")
    return find_checkpoint(checkpoint, "--output"), folders


def _refuse_twice(folders: Sequence[Path]) -> None:
    resolved = [folder.resolve() for folder in folders]
    for i, folder in enumerate(folders):
        if resolved[i] in resolved[:i]:
            raise UserError(f"checkpoint {folder} is named twice; name each one once")


def _check_same_function(cfg: ScalerunConfig, newest: Path, folder: Path) -> None:
    """Refuse weights that another function computes with, though their shapes may be equal."""
    content = json.loads(run_file(folder, CONFIG_FILE).read_text(encoding="utf-8"))
    settings = {name: value for name, value in content["model"].items() if name != "_name"}
    for theirs, ours in Architecture(cfg.model).differences({"settings": settings}):
        raise UserError(
            f"checkpoint {folder} was trained with {theirs}, and {newest} with {ours}; only "
            "checkpoints of one architecture have a mean"
        )


def _check_same_vocabulary(newest: Path, folder: Path) -> None:
    ours, theirs = (read_state(each)["task"] for each in (newest, folder))
    if None in (ours["vocabulary"], theirs["vocabulary"]):
        logger.warning(
            "%s or %s does not know its vocabulary; that both have the same one is taken on trust",
            newest,
            folder,
        )
        return
    for what in ("vocabulary", "source_vocabulary"):
        if ours.get(what) != theirs.get(what):
            sizes = [state.get(f"{what}_size", 0) for state in (theirs, ours)]
            raise UserError(
                f"checkpoint {folder} was trained with another {what.replace('_', ' ')} than "
                f"{newest} ({sizes[0]} and {sizes[1]} symbols); only checkpoints of one "
                "vocabulary have a mean"
            )


def _plain(state: dict[str, Any], num_updates: int) -> dict[str, Any]:
    """Everything of the mean that is not a tensor."""
    kept = {part: state[part] for part in KEPT if part in state}
    return kept | {"model": {}, "trainer": Progress(num_updates=num_updates).state_dict()}


def _run_files(newest: Path, folders: Sequence[Path], updates: Sequence[int]) -> dict[str, bytes]:
    """The newest checkpoint's settings and tokenizer, and a record of what went into the mean."""
    names = read_manifest(newest).files
    kept = [name for name in names if name == CONFIG_FILE or name.startswith(f"{ASSETS_FOLDER}/")]
    sources = [
        {
            "path": str(folder.resolve()),
            "num_updates": number,
            "manifest_sha256": hash_file(folder / MANIFEST),
        }
        for folder, number in zip(folders, updates, strict=True)
    ]
    files = {name: (newest / name).read_bytes() for name in kept}
    return files | {SOURCE_FILE: (json.dumps({"mean_of": sources}, indent=1) + "\n").encode()}
