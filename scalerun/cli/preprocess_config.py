"""What ``scalerun.cli.preprocess`` can be told, and the files that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scalerun.data.parallel.binarised_pairs import pair_name
from scalerun.data.tokenizers.fairseq_tokenizer import dictionary_file
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.ranges import MAX_WORKERS, at_least
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option


@dataclass(frozen=True)
class TextSet:
    """A text file that becomes binarised."""

    path: Path
    name: str
    """What the names of the new files begin with."""
    language: str | None


@dataclass(frozen=True)
class VocabularyPlan:
    """A vocabulary: which one, and what it is for."""

    languages: tuple[str | None, ...]
    """It becomes the dictionary of each of them."""
    given: str | None
    """A ``dict.txt`` to use; else the words of ``texts`` are it, or the tokenizer's pieces."""
    flag: str
    """What names it."""
    texts: tuple[Path, ...]
    threshold: int
    num_words: int

    @property
    def files(self) -> list[str]:
        """The names of its dictionaries."""
        return [dictionary_file(language) for language in self.languages]


@dataclass
class PreprocessConfig(ScalerunDataclass):
    """What ``scalerun.cli.preprocess`` can be told."""

    source_lang: str | None = option(
        None,
        "with --target-lang: make pairs of the files whose names end in .SOURCE and .TARGET",
        aliases=("-s",),
    )
    target_lang: str | None = option(None, "see --source-lang", aliases=("-t",))
    trainpref: list[str] = option(
        [],
        "text files to train on: an item a line, or JSON lines with the key text; of pairs, what "
        "the names of both files begin with",
    )
    validpref: list[str] = option([], "the same to validate on; each becomes a set")
    testpref: list[str] = option([], "the same to test on; each becomes a set")
    destdir: str = option("data-bin", "folder to write; must be empty or new")
    only_source: bool = option(
        False, "text of one language, as without --source-lang and --target-lang"
    )
    joined_dictionary: bool = option(False, "one vocabulary for both languages")
    srcdict: str | None = option(
        None, "dict.txt to use (default: the words of --trainpref, or the tokenizer's pieces)"
    )
    tgtdict: str | None = option(None, "the same of the target language")
    thresholdsrc: int = option(0, "words that --trainpref has less often become <unk>")
    thresholdtgt: int = option(0, "the same of the target language")
    nwordssrc: int = option(-1, "symbols of the vocabulary at most; -1 for no limit")
    nwordstgt: int = option(-1, "the same of the target language")
    padding_factor: int = option(8, "fill dict.txt up to a multiple of this many symbols")
    tokenizer: str | None = option(
        None,
        "bytes, a sentencepiece .model file, or a tokenizers .json file (default: white space "
        "parts words); of pairs it is that of both languages",
    )
    vocab_filename: str | None = option(None, "GPT-2 vocab.json, with --merges-filename")
    merges_filename: str | None = option(None, "GPT-2 merges.txt, with --vocab-filename")
    end_of_document_symbol: str | None = option(
        None, "the tokenizer's symbol for the end of a document (default: the usual one)"
    )
    workers: int = option(1, "processes")

    def validate(self) -> None:
        self._validate_languages()
        if not (self.trainpref or self.validpref or self.testpref):
            raise ConfigError("there is nothing to binarise: give --trainpref TEXT")
        if not self.destdir:
            raise ConfigError("--destdir is empty; name the folder to write")
        at_least("--padding-factor", self.padding_factor, 1)
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"--workers is {self.workers}; give 1 to {MAX_WORKERS}")
        if self.end_of_document_symbol is not None and not self.has_tokenizer:
            raise ConfigError("--end-of-document-symbol belongs to --tokenizer")
        self._validate_vocabularies()

    def _validate_languages(self) -> None:
        named = (self.source_lang, self.target_lang)
        if any(named) and not all(named):
            raise ConfigError("--source-lang and --target-lang are given together, for pairs")
        if self.is_pairs:
            if self.only_source:
                raise ConfigError(
                    "--only-source is for text of one language; leave it out, or --source-lang "
                    "and --target-lang"
                )
            if self.source_lang == self.target_lang:
                raise ConfigError(
                    f"--source-lang and --target-lang are both {self.source_lang}; give two endings"
                )
            if self.joined_dictionary and self.srcdict and self.tgtdict:
                raise ConfigError(
                    "--joined-dictionary is one dictionary for both languages; give --srcdict alone"
                )
            if self.joined_dictionary and (self.thresholdtgt != 0 or self.nwordstgt != -1):
                raise ConfigError(
                    "--thresholdtgt and --nwordstgt have no effect with --joined-dictionary; give "
                    "--thresholdsrc and --nwordssrc"
                )
            return
        for flag, given in (
            ("--joined-dictionary", self.joined_dictionary),
            ("--tgtdict", self.tgtdict is not None),
            ("--thresholdtgt", self.thresholdtgt != 0),
            ("--nwordstgt", self.nwordstgt != -1),
        ):
            if given:
                raise ConfigError(f"{flag} is for pairs; give --source-lang and --target-lang")

    def _validate_vocabularies(self) -> None:
        at_least("--thresholdsrc", self.thresholdsrc, 0)
        at_least("--nwordssrc", self.nwordssrc, -1)
        at_least("--thresholdtgt", self.thresholdtgt, 0)
        at_least("--nwordstgt", self.nwordstgt, -1)
        for plan in self.vocabularies():
            words = not self.has_tokenizer and plan.given is None
            if words and not self.trainpref:
                raise ConfigError(
                    f"a vocabulary is needed: {plan.flag}, --tokenizer, or --trainpref"
                )
            if not words and (plan.threshold > 0 or plan.num_words > 0):
                side = plan.flag.removeprefix("--")[:3]
                raise ConfigError(
                    f"--threshold{side} and --nwords{side} choose words of --trainpref; leave them "
                    f"out with {plan.flag} and --tokenizer"
                )

    @property
    def is_pairs(self) -> bool:
        """Whether there are two languages."""
        return self.source_lang is not None

    @property
    def languages(self) -> tuple[str | None, ...]:
        """Source and target; of text of one language, None alone."""
        return (self.source_lang, self.target_lang) if self.is_pairs else (None,)

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer is named; else white space parts words."""
        return bool(self.tokenizer or self.vocab_filename or self.merges_filename)

    def sets(self) -> list[list[TextSet]]:
        """The text files of each set: train, train1, ..., valid, ..., test, ...

        Those of one set have translations of each other.
        """
        named = (("train", self.trainpref), ("valid", self.validpref), ("test", self.testpref))
        return [
            [self._text_set(f"{name}{i or ''}", file, language) for language in self.languages]
            for name, files in named
            for i, file in enumerate(files)
        ]

    def _text_set(self, name: str, file: str, language: str | None) -> TextSet:
        if language is None:
            return TextSet(Path(file), name, None)
        assert self.source_lang is not None
        assert self.target_lang is not None
        stem = pair_name(name, self.source_lang, self.target_lang)
        return TextSet(_of_language(file, language), stem + language, language)

    def vocabularies(self) -> list[VocabularyPlan]:
        """The vocabularies to make, and what of."""
        source = ("--srcdict", self.srcdict, self.thresholdsrc, self.nwordssrc)
        target = ("--tgtdict", self.tgtdict, self.thresholdtgt, self.nwordstgt)
        if not self.is_pairs:
            return [self._plan((None,), *source)]
        if self.joined_dictionary:
            flag, given = ("--tgtdict", self.tgtdict) if self.tgtdict else source[:2]
            return [self._plan(self.languages, flag, given, *source[2:])]
        return [
            self._plan((language,), *side)
            for language, side in zip(self.languages, (source, target), strict=True)
        ]

    def _plan(
        self,
        languages: tuple[str | None, ...],
        flag: str,
        given: str | None,
        threshold: int,
        num_words: int,
    ) -> VocabularyPlan:
        texts = tuple(
            Path(file) if language is None else _of_language(file, language)
            for file in self.trainpref
            for language in languages
        )
        return VocabularyPlan(languages, given, flag, texts, threshold, num_words)


def _of_language(prefix: str, language: str) -> Path:
    """The text file of one language."""
    return Path(f"{prefix}.{language}")
