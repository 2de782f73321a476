"""Finding the files of a folder of binarised pairs: ``train.en-es.en.bin`` and its kin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from scalerun.data.binarised.binarised_layout import is_set, numbered
from scalerun.data.text.layout import VALID
from scalerun.dataclass.errors import ConfigError, UserError

SUFFIXES = (".idx", ".bin")


def pair_name(name: str, source_lang: str, target_lang: str) -> str:
    """What the names of both sides of a set begin with, a dot at the end."""
    return f"{name}.{source_lang}-{target_lang}."


def has_pairs(folder: Path) -> bool:
    """Whether a folder has binarised pairs of any languages."""
    return next(_named(folder), None) is not None


def find_languages(folder: Path) -> tuple[str, str]:
    """Source and target as the names of the files say.

    Raises:
        ConfigError: they name no pair of languages, or more than one.
    """
    pairs = sorted({(source, target) for _, source, target in _named(folder)})
    if len(pairs) == 1:
        return pairs[0]
    if not pairs:
        raise ConfigError("--source-lang is required: the ending of its files, such as en")
    shown = ", ".join(f"{source}-{target}" for source, target in pairs)
    raise ConfigError(
        f"{folder} has pairs of several languages ({shown}); choose with --source-lang and "
        "--target-lang"
    )


def _named(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Set, source and target of each file that is the source's side of a pair."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.suffix in SUFFIXES:
            name, _, rest = path.stem.partition(".")
            pair, _, language = rest.rpartition(".")
            if language and pair.startswith(f"{language}-"):
                yield name, language, pair.removeprefix(f"{language}-")


@dataclass(frozen=True)
class PairFolder:
    """A folder of binarised pairs, read in one direction."""

    folder: Path
    source_lang: str
    target_lang: str

    def stem(self, name: str) -> str | None:
        """What the names of the files of a set begin with; None where there are none.

        The files of the other direction are the same pairs.
        """
        languages = self.source_lang, self.target_lang
        for first, second in (languages, languages[::-1]):
            stem = pair_name(name, first, second)
            if any(is_set(self.folder, stem + language) for language in languages):
                return stem
        return None

    def has_side(self, name: str, language: str) -> bool:
        """Whether a set has files of a language."""
        stem = self.stem(name)
        return stem is not None and is_set(self.folder, stem + language)

    def prefixes(self, split: str, *, whole: bool, with_target: bool = True) -> list[list[Path]]:
        """What the names of the files of sources, and then of targets, begin with.

        Args:
            whole: with the numbered files that continue the set.
            with_target: whether the targets are wanted.

        Raises:
            UserError: there is no such set, or it lacks a side.
        """
        names = self._numbered(split) if whole else [split]
        stems = [stem for name in names if (stem := self.stem(name)) is not None]
        if not stems:
            raise UserError(
                f"{self.folder} has no {pair_name(split, self.source_lang, self.target_lang)}"
                f"{self.source_lang}.idx; {self._choices()}"
            )
        directions = [(self.source_lang, self.target_lang), (self.target_lang, self.source_lang)]
        for stem, (language, other) in product(stems, directions[: 1 + with_target]):
            if not is_set(self.folder, stem + language):
                raise UserError(
                    f"{self.folder / stem}{language}.idx and .bin are not there, but belong to "
                    f"{stem}{other}.idx; copy both again, or binarise the text again"
                )
        languages = [language for language, _ in directions[: 1 + with_target]]
        return [[self.folder / (stem + language) for stem in stems] for language in languages]

    def sets(self, names: Iterable[str]) -> list[str]:
        """The sets that the names stand for: each by itself, and so are those it numbers.

        The name ``valid`` may be absent: it is the default of ``--valid-subset``.

        Raises:
            UserError: a set is not there.
        """
        found: list[str] = []
        for name in names:
            sets = self._numbered(name)
            if not sets and name != VALID:
                raise UserError(f"--valid-subset {name} is not in {self.folder}; {self._choices()}")
            found += [each for each in sets if each not in found]
        return found

    def _numbered(self, name: str) -> list[str]:
        return numbered(name, lambda each: self.stem(each) is not None)

    def _choices(self) -> str:
        pair = {self.source_lang, self.target_lang}
        sets = sorted({name for name, *languages in _named(self.folder) if set(languages) == pair})
        shown = f"--source-lang {self.source_lang} and --target-lang {self.target_lang}"
        return f"sets of {shown}: {', '.join(sets) or 'none'}"
