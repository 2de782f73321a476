"""Finding the text files of a data folder: splits, shards, corpora."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from scalerun.dataclass.errors import UserError

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt")
TRAIN = "train"
VALID = "valid"
MAX_NAMES_SHOWN = 8


@dataclass(frozen=True)
class TextFile:
    """One file of documents."""

    path: Path
    name: str
    """Path below the data folder, with forward slashes: the same on every machine."""

    @property
    def suffix(self) -> str:
        """Which of :data:`SUFFIXES` its name ends in."""
        lower = self.path.name.lower()
        return next(suffix for suffix in SUFFIXES if lower.endswith(suffix))

    @property
    def corpus(self) -> str:
        """File name without its ending; ``--corpus-weights`` uses it."""
        return self.path.name[: -len(self.suffix)]


@dataclass(frozen=True)
class Split:
    """A set of documents, in shards that are read one after the other."""

    name: str
    """Folder below the data folder, such as ``train`` or ``valid/wiki``."""
    shards: list[list[TextFile]]
    """Files of each shard, sorted by name; no shard is empty."""

    @property
    def corpora(self) -> list[str]:
        """Names of all corpora, sorted."""
        return sorted({file.corpus for shard in self.shards for file in shard})


def find_split(data: str | Path, name: str) -> Split:
    """The files of one split.

    ``DATA/<name>/<integer>/*.jsonl``: a folder for each shard, in numerical order.
    ``DATA/<name>/*.jsonl``: one shard. ``DATA/*.jsonl``: one shard, for the split ``train`` only,
    where there is no ``DATA/train``. Other files and folders are left alone and logged.

    Raises:
        UserError: a folder is missing or holds no text files.
    """
    root = data_folder(data)
    folder = root / name
    if folder.is_dir():
        split = _read_split(root, folder, name)
        if split is not None:
            return split
        raise UserError(f"{folder} holds no text files; {_expected(folder)}")
    if name == TRAIN:
        files = _text_files(root, root)
        if files:
            _log_strays(
                root,
                (p for p in _entries(root) if not p.is_dir() and p not in {f.path for f in files}),
            )
            return Split(name, [files])
        raise UserError(
            f"{root} has neither a folder named train nor text files; {_expected(root)}"
        )
    raise UserError(f"{root} has no set {name!r}; {_choices(root, name)}")


def find_sets(data: str | Path, names: Iterable[str], *, held_out: bool = False) -> list[str]:
    """Names of the sets that ``names`` stand for: itself, or every set below a folder of sets.

    The name ``valid`` may be absent: it is the default of ``--valid-subset``. The name ``train``
    also stands for the text of a plain folder.

    Args:
        held_out: a part of the training text is the set ``valid``.

    Raises:
        UserError: a set is not there; the message lists those that are.
    """
    root = data_folder(data)
    found: list[str] = []
    for name in names:
        name = name.strip("/")
        sets = _sets_at(root, name)
        if (name == VALID and held_out) or (name == TRAIN and is_plain(root)):
            sets = [name]
        if not sets and not (name == VALID and not (root / name).exists()):
            raise UserError(f"--valid-subset {name} is not in {root}; {_choices(root, name)}")
        found += [each for each in sets if each not in found]
    return found


def is_plain(root: Path) -> bool:
    """Whether a data folder has its text directly in it, and no folder ``train``."""
    return not (root / TRAIN).is_dir() and bool(_text_files(root, root))


def data_folder(data: str | Path) -> Path:
    """The data folder.

    Raises:
        UserError: it does not exist or is not a folder.
    """
    if not str(data):
        raise UserError("the data folder is missing: give it as the first argument")
    root = Path(data)
    if root.is_dir():
        return root
    what = "is a file" if root.is_file() else "does not exist"
    place = root if root.is_absolute() else f"{root} ({root.absolute()})"
    raise UserError(f"the data folder {place} {what}; give a folder with text files in it")


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error


def _text_files(root: Path, folder: Path) -> list[TextFile]:
    return [
        TextFile(path, path.relative_to(root).as_posix())
        for path in _entries(folder)
        if path.name.lower().endswith(SUFFIXES) and not path.name.startswith(".") and path.is_file()
    ]


def _shard_folders(root: Path, folder: Path) -> dict[Path, list[TextFile]]:
    """Folders with an integer name that hold text files, in numerical order."""
    numbered = [
        path
        for path in _entries(folder)
        if path.name.isascii() and path.name.isdigit() and path.is_dir()
    ]
    numbered.sort(key=lambda path: (int(path.name), path.name))
    shards = {path: _text_files(root, path) for path in numbered}
    return {path: files for path, files in shards.items() if files}


def _read_split(root: Path, folder: Path, name: str) -> Split | None:
    shards = _shard_folders(root, folder)
    if shards:
        _log_strays(folder, (path for path in _entries(folder) if path not in shards))
        for path, files in shards.items():
            used = {file.path for file in files}
            _log_strays(path, (entry for entry in _entries(path) if entry not in used))
        _log_gaps(folder, [int(path.name) for path in shards])
        return Split(name, list(shards.values()))
    files = _text_files(root, folder)
    if files:
        used = {file.path for file in files}
        _log_strays(folder, (path for path in _entries(folder) if path not in used))
        return Split(name, [files])
    return None


def _sets_at(root: Path, name: str) -> list[str]:
    folder = root / name
    if not folder.is_dir():
        return []
    own = [name] if _text_files(root, folder) or _shard_folders(root, folder) else []
    below = [
        f"{name}/{path.name}"
        for path in _entries(folder)
        if path.is_dir()
        and not path.name.startswith(".")
        and (_shard_folders(root, path) or (not own and _text_files(root, path)))
    ]
    return own + below


def _choices(root: Path, name: str) -> str:
    sets = [each for path in _entries(root) if path.is_dir() for each in _sets_at(root, path.name)]
    sets = [each for each in sets if each != TRAIN]
    if not sets:
        return (
            "the folder has no validation sets (DATA/valid/<name>/<shard>/*.jsonl); "
            "--valid-fraction holds a part of the training text out"
        )
    close = difflib.get_close_matches(name, sets, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}sets there: {_listed(sets)}"


def _expected(folder: Path) -> str:
    names = [path.name for path in _entries(folder)]
    found = f"found {_listed(names)}" if names else "it is empty"
    return f"{found}; expected {', '.join(SUFFIXES)} files, or folders 0, 1, ... with such files"


def _log_strays(folder: Path, paths: Iterable[Path]) -> None:
    strays = list(paths)
    if strays:
        logger.info("not used in %s: %s", folder, _listed([path.name for path in strays]))
    for path in strays:
        if path.name.lower().endswith(SUFFIXES) and not path.name.startswith("."):
            kind = "a folder" if path.is_dir() else "a pipe or another special file"
            if path.is_symlink() and not path.exists():
                kind = f"a link to {path.readlink()}, which is not there"
            if not path.is_file():
                logger.warning("%s is not read: it is %s", path, kind)


def _log_gaps(folder: Path, numbers: list[int]) -> None:
    num_absent = numbers[-1] - numbers[0] + 1 - len(set(numbers))
    if num_absent:
        logger.info(
            "shard numbers in %s run from %d to %d; %d of them are missing",
            folder, numbers[0], numbers[-1], num_absent,
        )  # fmt: skip


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMES_SHOWN
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
