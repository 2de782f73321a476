"""Finding the files of a folder of parallel text: ``train.en`` and ``train.es``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from scalerun.data.text.layout import TRAIN, VALID, data_folder
from scalerun.data.text.segment_dataset import SegmentFile
from scalerun.dataclass.errors import UserError


def find_pair(
    data: str | Path, split: str, *, source_lang: str, target_lang: str
) -> tuple[SegmentFile, SegmentFile]:
    """The files of a split's sources and targets.

    Raises:
        UserError: a file is missing; the message says what is there.
    """
    root = data_folder(data)
    files = [
        SegmentFile(root / f"{split}.{lang}", f"{split}.{lang}")
        for lang in (source_lang, target_lang)
    ]
    for file in files:
        if not file.path.is_file():
            what = "is a folder" if file.path.is_dir() else "is missing"
            raise UserError(
                f"{file.path} {what}: a set of --task translation is two text files with one "
                f"segment a line; {_there(root, source_lang, target_lang)}"
            )
    return files[0], files[1]


def find_pair_sets(
    data: str | Path, names: Iterable[str], *, source_lang: str, target_lang: str
) -> list[str]:
    """The named sets, without ``valid`` where there is none of its files.

    Raises:
        UserError: another set is not there.
    """
    root = data_folder(data)
    found: list[str] = []
    for name in names:
        paths = [root / f"{name}.{lang}" for lang in (source_lang, target_lang)]
        if name == VALID and not any(path.exists() for path in paths):
            continue
        find_pair(data, name, source_lang=source_lang, target_lang=target_lang)
        found += [name] if name not in found else []
    return found


def _there(root: Path, source_lang: str, target_lang: str) -> str:
    """The sets that a folder has, for a message."""
    names = {path.name for path in root.iterdir() if path.is_file()}
    sets = sorted(
        name.removesuffix(f".{source_lang}")
        for name in names
        if name.endswith(f".{source_lang}")
        and f"{name.removesuffix(f'.{source_lang}')}.{target_lang}" in names
    )
    pair = f"--source-lang {source_lang} and --target-lang {target_lang}"
    if sets:
        return f"sets with files of {pair}: {', '.join(sets)}; put the file there, or name one"
    endings = sorted(
        {name.rpartition(".")[2] for name in names if name.startswith((f"{TRAIN}.", f"{VALID}."))}
    )
    return (
        f"sets with files of {pair}: none; the languages of the files in {root} are "
        f"{', '.join(endings) or 'none'}: correct {pair}, or put the files there"
    )
