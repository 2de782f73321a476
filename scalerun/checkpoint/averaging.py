"""The mean of several checkpoints' weights, tensor by tensor."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import scalerun
from scalerun.checkpoint.atomic import FileRecord, sync_tree, write_file
from scalerun.checkpoint.checkpoint_folder import CheckpointFolder
from scalerun.checkpoint.consolidation import MODEL
from scalerun.checkpoint.manifest import MANIFEST, Manifest
from scalerun.checkpoint.reader import is_checkpoint
from scalerun.checkpoint.state_tree import to_json
from scalerun.checkpoint.storage import StoredTensors, bytes_needed, save_one_by_one
from scalerun.checkpoint.writer import SPARE_BYTES, STATE
from scalerun.dataclass.errors import UserError


def newest_checkpoints(run: Path, count: int) -> list[Path]:
    """The newest checkpoints of a run, oldest first.

    Raises:
        UserError: there is no such run folder, or it has fewer.
    """
    if not run.is_dir() or is_checkpoint(run):
        what = "is a checkpoint" if run.is_dir() else "does not exist"
        raise UserError(f"PATH {run} {what}; --last takes the folder of a run")
    found = [folder for _, folder in CheckpointFolder(run).checkpoints()]
    if len(found) < count:
        raise UserError(f"{run} has {len(found)} checkpoints, fewer than --last {count}")
    return found[:count][::-1]


def check_same_tensors(folders: Sequence[Path]) -> None:
    """Refuse checkpoints whose weights have other names, shapes or number formats.

    Raises:
        UserError: names the first three tensors that differ.
    """
    first, *others = folders
    expected = StoredTensors(first).templates(MODEL)
    for folder in others:
        found = StoredTensors(folder).templates(MODEL)
        names = [*expected, *(name for name in found if name not in expected)]
        differing = [n for n in names if _facts(expected.get(n)) != _facts(found.get(n))]
        if differing:
            shown = "; ".join(
                f"{name} is {_facts(found.get(name))}, not {_facts(expected.get(name))}"
                for name in differing[:3]
            )
            more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise UserError(f"checkpoint {folder} has other weights than {first}: {shown}{more}")


class MeanWeights:
    """The mean of the same tensor in every checkpoint, summed up in float64.

    Averaging and writing tensor by tensor takes six times the largest one's size in float32.

    Args:
        folders: verified checkpoints whose weights are alike.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self.stores = [StoredTensors(folder) for folder in folders]

    def templates(self) -> dict[str, Tensor]:
        """Shapes and number formats, which are those of the checkpoints."""
        return self.stores[0].templates(MODEL)

    def read(self, name: str) -> Tensor:
        """One mean, in the number format of the checkpoints.

        Raises:
            UserError: whole numbers that differ, which have no mean.
        """
        tensor = self.stores[0].read(name)
        if not tensor.is_floating_point():
            for folder, store in zip(self.folders[1:], self.stores[1:], strict=True):
                if not torch.equal(store.read(name), tensor):
                    raise UserError(
                        f"{name} holds whole numbers, which differ in {folder}; such checkpoints "
                        "have no mean"
                    )
            return tensor
        dtype = tensor.dtype
        total = tensor.to(torch.float64)
        del tensor
        for store in self.stores[1:]:
            total += store.read(name)
        return total.div_(len(self.stores)).to(dtype)


def write_mean(
    output: Path,
    num_updates: int,
    folders: Sequence[Path],
    *,
    plain: Mapping[str, Any],
    run_files: Mapping[str, bytes],
) -> Path:
    """Write the mean of checkpoints as ``checkpoint_<num_updates>`` of a run folder.

    Args:
        folders: verified, and alike.
        plain: everything that is not a tensor, by part.
        run_files: what else the checkpoint holds.

    Raises:
        UserError: the folder cannot be written, or a tensor has no mean.
    """
    mean = MeanWeights(folders)
    folder = CheckpointFolder(output)
    folder.open_for_writing()
    needed = bytes_needed(mean.templates()) + SPARE_BYTES
    available = shutil.disk_usage(output).free
    if available < needed:
        raise UserError(f"--output {output} needs {needed} bytes, and {available} are free")
    temporary = folder.temporary(num_updates)
    try:
        temporary.mkdir()
        files = {
            name: write_file(temporary / name, content)
            for name, content in {STATE: to_json(plain), **run_files}.items()
        }
        files |= save_one_by_one(temporary, {MODEL: mean.templates()}, mean.read)
        write_file(temporary / MANIFEST, _manifest(num_updates, files).to_json())
        sync_tree(temporary)
        return folder.commit(temporary, num_updates)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _manifest(num_updates: int, files: dict[str, FileRecord]) -> Manifest:
    return Manifest(
        num_updates=num_updates,
        files=files,
        version=scalerun.__version__,
        torch_version=torch.__version__,
        world_size=1,
    )


def _facts(tensor: Tensor | None) -> str:
    """A tensor's shape and number format, for messages."""
    if tensor is None:
        return "missing"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
