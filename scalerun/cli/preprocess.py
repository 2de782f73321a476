"""Binarise text: ``python -m scalerun.cli.preprocess --trainpref TEXT --destdir FOLDER``."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

from scalerun.checkpoint.atomic import sync_folder, write_file
from scalerun.cli.entry import run_cli
from scalerun.cli.output_file import refuse_full_folder
from scalerun.data.binarised.binarisation import (
    Binariser,
    TextCounts,
    choose_words,
    count_words,
    dictionary_text,
    read_batches,
)
from scalerun.data.binarised.indexed_dataset import IndexedWriter, stored_dtype
from scalerun.data.ordered_workers import OrderedWorkers
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.data.tokenizers.fairseq_dictionary import read_fairseq_dictionary
from scalerun.data.tokenizers.fairseq_tokenizer import (
    DICTIONARY_FILE,
    ONE_FILE,
    RECORD_FILE,
    load_vocabulary,
    piece_names,
)
from scalerun.data.tokenizers.tokenizer import BYTES, load_tokenizer
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.parser import parse_config
from scalerun.dataclass.ranges import MAX_WORKERS, at_least
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option
from scalerun.logging.console import setup_logging

logger = logging.getLogger("scalerun.cli.preprocess")  # also when run as __main__

COMPRESSED = (".gz", ".zst")


@dataclass
class PreprocessConfig(ScalerunDataclass):
    """What ``scalerun.cli.preprocess`` can be told."""

    trainpref: list[str] = option(
        [], "text files to train on: an item a line, or JSON lines with the key text"
    )
    validpref: list[str] = option([], "text files to validate on; each becomes a set")
    testpref: list[str] = option([], "text files to test on; each becomes a set")
    destdir: str = option("data-bin", "folder to write; must be empty or new")
    only_source: bool = option(True, "text of one language; pairs of languages are not made here")
    srcdict: str | None = option(
        None, "dict.txt to use (default: the words of --trainpref, or the tokenizer's pieces)"
    )
    thresholdsrc: int = option(0, "words that --trainpref has less often become <unk>")
    nwordssrc: int = option(-1, "symbols of the vocabulary at most; -1 for no limit")
    padding_factor: int = option(8, "fill dict.txt up to a multiple of this many symbols")
    tokenizer: str | None = option(
        None,
        "bytes, a sentencepiece .model file, or a tokenizers .json file (default: white space "
        "parts words)",
    )
    vocab_filename: str | None = option(None, "GPT-2 vocab.json, with --merges-filename")
    merges_filename: str | None = option(None, "GPT-2 merges.txt, with --vocab-filename")
    end_of_document_symbol: str | None = option(
        None, "the tokenizer's symbol for the end of a document (default: the usual one)"
    )
    workers: int = option(1, "processes")

    def validate(self) -> None:
        if not self.only_source:
            raise ConfigError("--no-only-source asks for pairs of languages, which are not made")
        if not (self.trainpref or self.validpref or self.testpref):
            raise ConfigError("there is nothing to binarise: give --trainpref TEXT")
        if not self.destdir:
            raise ConfigError("--destdir is empty; name the folder to write")
        at_least("--padding-factor", self.padding_factor, 1)
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"--workers is {self.workers}; give 1 to {MAX_WORKERS}")
        words = not self.has_tokenizer and self.srcdict is None
        if words and not self.trainpref:
            raise ConfigError("a vocabulary is needed: --srcdict, --tokenizer, or --trainpref")
        at_least("--thresholdsrc", self.thresholdsrc, 0)
        at_least("--nwordssrc", self.nwordssrc, -1)
        if not words and (self.thresholdsrc > 0 or self.nwordssrc > 0):
            raise ConfigError(
                "--thresholdsrc and --nwordssrc choose words of --trainpref; leave them out with "
                "--srcdict and --tokenizer"
            )
        if self.end_of_document_symbol is not None and not self.has_tokenizer:
            raise ConfigError("--end-of-document-symbol belongs to --tokenizer")

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer is named; else white space parts words."""
        return bool(self.tokenizer or self.vocab_filename or self.merges_filename)

    @property
    def sets(self) -> dict[str, Path]:
        """The text file of each set: train, train1, ..., valid, ..., test, ..."""
        named = (("train", self.trainpref), ("valid", self.validpref), ("test", self.testpref))
        return {
            f"{name}{i or ''}": Path(file) for name, files in named for i, file in enumerate(files)
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Binarise text into a new folder; return the exit code."""
    cfg = parse_config(PreprocessConfig, argv, prog="scalerun-preprocess")
    setup_logging()
    preprocess(cfg)
    return 0


def preprocess(cfg: PreprocessConfig) -> None:
    """Write ``cfg.destdir``, which appears when everything is in it.

    The bytes of its files do not depend on the number of workers.

    Raises:
        UserError: a file cannot be read, or the folder has something in it already.
    """
    destination = Path(cfg.destdir).absolute()
    refuse_full_folder("--destdir", destination)
    for path in cfg.sets.values():
        if not path.is_file():
            raise UserError(f"{path} is not there, or is no file; give a text file")
    with new_folder(destination) as folder:
        record = write_vocabulary(cfg, folder)
        vocabulary = load_vocabulary(folder)
        logger.info("%s: %d symbols", DICTIONARY_FILE, vocabulary.dictionary.num_real_symbols)
        counts = {
            name: binarise(path, folder / name, vocabulary, workers=cfg.workers)
            for name, path in cfg.sets.items()
        }
        for name, each in counts.items():
            if not each.tokens:
                raise UserError(f"{cfg.sets[name]} has no text; give a file with some")
        record["sets"] = {name: noted(each, cfg) for name, each in counts.items()}
        write_file(folder / RECORD_FILE, encoded(record))
    logger.info("%s is ready: --task language_modeling trains on it", destination)


@contextlib.contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A folder beside ``destination``, which gets this name unless an error comes up.

    What a killed process left behind is taken over.

    Raises:
        UserError: it cannot be made, or another process is filling it.
    """
    folder = destination.with_name(f".{destination.name}.partial")
    lock = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = lock.open("w")
    except OSError as error:
        raise UserError(f"--destdir {destination} cannot be made: {error.strerror}") from error
    with handle:
        try:
            # Unlike flock's, this lock is not kept by workers that outlive their parent a little.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"--destdir {destination} is being made by another process") from error
        for leftover in folder.iterdir():
            if leftover != lock:
                leftover.unlink()
        yield folder
        lock.unlink()
        sync_folder(folder)
        os.rename(folder, destination)
        sync_folder(destination.parent)


def write_vocabulary(cfg: PreprocessConfig, folder: Path) -> dict[str, Any]:
    """Write ``dict.txt`` and the tokenizer's files; return what the record says of them."""
    record: dict[str, Any] = {"tokenizer": None}
    symbols: list[tuple[str, int]] = []
    if cfg.has_tokenizer:
        tokenizer = load_tokenizer(
            cfg.tokenizer, cfg.vocab_filename, cfg.merges_filename, cfg.end_of_document_symbol
        )
        symbols = [(name, 1) for name in piece_names(tokenizer)]
        files = stored_names(tokenizer)
        record["tokenizer"] = BYTES if cfg.tokenizer == BYTES else sorted(files)
        record["end_of_document_symbol"] = cfg.end_of_document_symbol
        for name, source in files.items():
            write_file(folder / name, source.read_bytes())
    if cfg.srcdict is not None:
        if not read_fairseq_dictionary(Path(cfg.srcdict), "--srcdict"):
            raise UserError(f"--srcdict {cfg.srcdict} lists no symbol; give fairseq's dict.txt")
        content = Path(cfg.srcdict).read_bytes()
    else:
        symbols = symbols or words_of_training(cfg)
        content = dictionary_text(symbols, padding_factor=cfg.padding_factor).encode()
    write_file(folder / DICTIONARY_FILE, content)
    write_file(folder / RECORD_FILE, encoded(record))
    return record


def stored_names(tokenizer: BaseTokenizer) -> dict[str, Path]:
    """The tokenizer's files by the names under which training looks for them."""
    if len(tokenizer.files) != 1:
        return tokenizer.files
    (path,) = tokenizer.files.values()
    return {ONE_FILE[path.suffix == ".json"]: path}


def words_of_training(cfg: PreprocessConfig) -> list[tuple[str, int]]:
    """The words of the files to train on, as ``dict.txt`` lists them."""
    words: Counter[str] = Counter()
    with OrderedWorkers(count_words, cfg.workers) as workers:
        for file in cfg.trainpref:
            batches = workers.map(read_batches(Path(file)))
            for counted in shown(batches, Path(file), "counting words"):
                words.update(counted.words)
    return choose_words(words, threshold=cfg.thresholdsrc, num_words=cfg.nwordssrc)


def binarise(path: Path, prefix: Path, tokenizer: BaseTokenizer, *, workers: int) -> TextCounts:
    """Write ``prefix.bin`` and ``prefix.idx`` from a text file, and say what it has."""
    own = tokenizer.dictionary
    work = Binariser(tokenizer, stored_dtype(own.num_real_symbols))
    total = TextCounts()
    with OrderedWorkers(work, workers) as crew, IndexedWriter(prefix, work.dtype) as writer:
        for batch in shown(crew.map(read_batches(path)), path, prefix.name):
            writer.add(batch.tokens, batch.sizes)
            total += batch.counts
        writer.commit()
    logger.info(
        "%s: %s has %d items, %d tokens; %.3f%% of them are not in the vocabulary",
        prefix.name, path, total.items, total.tokens, 100 * total.unknown / max(total.tokens, 1),
    )  # fmt: skip
    return total


def noted(counts: TextCounts, cfg: PreprocessConfig) -> dict[str, int]:
    """What the record says of a set: its bytes only where the tokens tell all of them."""
    numbers = asdict(counts)
    if not cfg.has_tokenizer or counts.unknown:
        del numbers["bytes"]
    return numbers


def encoded(record: dict[str, Any]) -> bytes:
    """The record as it is written."""
    return (json.dumps(record, indent=1) + "\n").encode()


class Step(Protocol):
    """A result whose work has read a part of a file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""


S = TypeVar("S", bound=Step)


def shown(steps: Iterable[S], path: Path, what: str) -> Iterator[S]:
    """Pass results on, with a progress bar where standard error is a terminal."""
    size = None if path.suffix.lower() in COMPRESSED else path.stat().st_size
    with tqdm(total=size, desc=what, unit="B", unit_scale=True, disable=None) as bar:
        for step in steps:
            yield step
            bar.update(step.num_bytes)


def cli_main() -> None:
    """Entry point of ``scalerun-preprocess``."""
    run_cli(main)


if __name__ == "__main__":
    cli_main()
