"""The files of a data folder that a JSON index lists, with the weights of their corpora."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerun.data.mixture_dataset import Mixture
from scalerun.data.text.layout import VALID, Split, TextFile, data_folder
from scalerun.dataclass.errors import UserError

FOLDER = "json"
NO_ENTRY = re.compile(r"[\s,]*")
"""What stands between the elements of a list."""


@dataclass(frozen=True)
class ListedFile(TextFile):
    """A file of sentences, one a line, that an index names."""

    listed_corpus: str

    @property
    def suffix(self) -> str:
        return ".sentences"

    @property
    def corpus(self) -> str:
        return self.listed_corpus


@dataclass(frozen=True)
class Corpus:
    """One entry of an index."""

    name: str
    """Its ``source_lang``, with a number where several have the same."""
    weight: float
    files: list[ListedFile]


def read_index(data: str | Path, name: str) -> list[Corpus]:
    """The corpora that ``DATA/json/<name>.json`` lists, without those of weight 0.

    The file is a list of ``{"source": [paths below DATA], "source_lang": name, "weight": number}``.
    ``count`` stands in for an absent weight; one corpus alone needs neither.

    Raises:
        UserError: it is not such a list, or a file that it names is not there.
    """
    root = data_folder(data)
    path = root / FOLDER / f"{name}.json"
    entries = _entries(path)
    several = len(entries) > 1
    corpora: list[Corpus] = []
    known: Counter[str] = Counter()
    for i, (line, entry) in enumerate(entries, start=1):
        where = f"{path}:{line}: entry {i}"
        sources = _sources(entry, where)
        language = entry.get("source_lang", "text")
        if not isinstance(language, str):
            raise UserError(f"{where}: source_lang is {language!r}; give a name in quotes")
        known[language] += 1
        corpus = language if known[language] == 1 else f"{language}-{known[language]}"
        weight = _weight(entry, where, needed=several)
        files = [ListedFile(root / source, source, corpus) for source in sources]
        for file in files:
            if not file.path.is_file():
                raise UserError(
                    f"{where} names {file.name}, which is not a file below {root}; put it there, "
                    "or correct the entry"
                )
        if weight > 0:
            corpora.append(Corpus(corpus, weight, files))
    if not corpora:
        raise UserError(f"{path} leaves nothing to read: all weights are 0; give a positive one")
    return corpora


def training_split(corpora: list[Corpus], name: str) -> tuple[Split, Mixture]:
    """Shards that each hold all corpora, and the shares of their tokens.

    The i-th files of all corpora are shard i. Corpora with fewer files begin again, so that each
    shard can have the shares that are asked for.
    """
    count = max(len(corpus.files) for corpus in corpora)
    shards: list[list[TextFile]] = [
        [corpus.files[i % len(corpus.files)] for corpus in corpora] for i in range(count)
    ]
    weights = {corpus.name: corpus.weight for corpus in corpora}
    return Split(name, shards), Mixture(weights if len(corpora) > 1 else {})


def whole_split(corpora: list[Corpus], name: str) -> Split:
    """Each file as a shard of its own, once."""
    return Split(name, [[file] for corpus in corpora for file in corpus.files])


def find_indices(data: str | Path, names: Iterable[str]) -> list[str]:
    """Those of the names that have an index; ``valid``, the default, may be without.

    Raises:
        UserError: another one has none; the message lists those that are there.
    """
    folder = data_folder(data) / FOLDER
    there = sorted(path.stem for path in folder.glob("*.json"))
    found: list[str] = []
    for name in names:
        if name in there:
            found += [name] if name not in found else []
        elif name != VALID:
            raise UserError(
                f"--valid-subset {name}: there is no {folder / name}.json; sets there: "
                f"{', '.join(there) or 'none'}"
            )
    return found


def _entries(path: Path) -> list[tuple[int, Any]]:
    """The elements of the list in a file, each with the line that it begins on."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is not there: it has to list the text files of the set {path.stem}"
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text; write it again as such") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}; repair it") from error
    if not isinstance(content, list) or not content:
        kind = "an empty list" if isinstance(content, list) else type(content).__name__
        raise UserError(
            f"{path} is {kind}; it has to be a list of corpora, such as "
            '[{"source": ["shard/train/00000.txt"], "source_lang": "en", "weight": 1.0}]'
        )
    return list(zip(_lines_of_entries(text), content, strict=True))


def _lines_of_entries(text: str) -> Iterator[int]:
    """The line, from 1, on which each element of a JSON list begins."""
    decoder, end = json.JSONDecoder(), text.index("[") + 1
    while (start := _next(text, end)) < len(text) and text[start] != "]":
        yield text.count("\n", 0, start) + 1
        _, end = decoder.raw_decode(text, start)


def _next(text: str, end: int) -> int:
    """Where the next element begins."""
    between = NO_ENTRY.match(text, end)
    assert between is not None
    return between.end()


def _sources(entry: Any, where: str) -> list[str]:
    sources = entry.get("source") if isinstance(entry, dict) else None
    if (
        not isinstance(sources, list)
        or not sources
        or not all(isinstance(source, str) and source for source in sources)
    ):
        raise UserError(
            f'{where} has no list of files; an entry is {{"source": ["shard/train/00000.txt"], '
            '"source_lang": "en", "weight": 1.0}'
        )
    return sources


def _weight(entry: dict[str, Any], where: str, *, needed: bool) -> float:
    key = "weight" if "weight" in entry else "count"
    value = entry.get(key, None if needed else 1.0)
    if value is None:
        raise UserError(
            f"{where} has neither weight nor count, which several corpora need; give a weight"
        )
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise UserError(
            f"{where}: {key} is {value!r}; give a positive number, or 0 to leave it out"
        )
    return float(value)
