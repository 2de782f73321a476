"""Finding the files of a folder of binarised text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from scalerun.data.text.layout import VALID, data_folder
from scalerun.dataclass.errors import UserError


def numbered(name: str, is_there: Callable[[str], bool]) -> list[str]:
    """The set of this name and those that continue it: ``train``, ``train1``, ``train2``.

    A name with a number at its end stands for itself alone.
    """
    found: list[str] = []
    while is_there(following := f"{name}{len(found) or ''}"):
        found.append(following)
        if name[-1:].isdigit():
            break
    return found


def is_set(folder: Path, name: str) -> bool:
    """Whether one of the two files of a set is there."""
    return any((folder / f"{name}{suffix}").exists() for suffix in (".bin", ".idx"))


def find_prefixes(data: str, split: str, *, whole: bool) -> list[Path]:
    """What the names of the files of a split begin with.

    Args:
        whole: with the numbered files that continue it.

    Raises:
        UserError: there is no such set; the message lists those that are.
    """
    folder = data_folder(data)
    if not is_set(folder, split):
        raise UserError(f"{folder} has no {split}.idx and {split}.bin; {_choices(folder)}")
    names = numbered(split, partial(is_set, folder)) if whole else [split]
    return [folder / name for name in names]


def find_binarised_sets(data: str, names: Iterable[str]) -> list[str]:
    """The sets that the names stand for: each is a set by itself, and so are those it numbers.

    The name ``valid`` may be absent: it is the default of ``--valid-subset``.

    Raises:
        UserError: a set is not there; the message lists those that are.
    """
    folder = data_folder(data)
    found: list[str] = []
    for name in names:
        sets = numbered(name, partial(is_set, folder))
        if not sets and name != VALID:
            raise UserError(f"--valid-subset {name} is not in {folder}; {_choices(folder)}")
        found += [each for each in sets if each not in found]
    return found


def _choices(folder: Path) -> str:
    sets = sorted(path.stem for path in folder.glob("*.idx"))
    return f"sets there: {', '.join(sets) or 'none'}"
