"""Binarise text, or pairs of it: ``python -m scalerun.cli.preprocess --trainpref TEXT …``."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

from scalerun.checkpoint.atomic import sync_folder, write_file
from scalerun.cli.entry import run_cli
from scalerun.cli.output_file import refuse_full_folder
from scalerun.cli.preprocess_config import PreprocessConfig, TextSet, VocabularyPlan
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
    ONE_FILE,
    RECORD_FILE,
    dictionary_file,
    load_vocabulary,
    piece_names,
)
from scalerun.data.tokenizers.tokenizer import BYTES, load_tokenizer
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.parser import parse_config
from scalerun.logging.console import setup_logging

logger = logging.getLogger("scalerun.cli.preprocess")  # also when run as __main__

COMPRESSED = (".gz", ".zst")


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
    for text in (text for texts in cfg.sets() for text in texts):
        if not text.path.is_file():
            raise UserError(f"{text.path} is not there, or is no file; give a text file")
    with new_folder(destination) as folder:
        record = write_vocabularies(cfg, folder)
        vocabularies = {language: load_vocabulary(folder, language) for language in cfg.languages}
        for language, vocabulary in vocabularies.items():
            size = vocabulary.dictionary.num_real_symbols
            logger.info("%s: %d symbols", dictionary_file(language), size)
        record["sets"] = {}
        for texts in cfg.sets():
            counts = [
                binarise(
                    text.path, folder / text.name, vocabularies[text.language], workers=cfg.workers
                )
                for text in texts
            ]
            check_counts(texts, counts)
            record["sets"] |= {
                text.name: noted(each, cfg) for text, each in zip(texts, counts, strict=True)
            }
        write_file(folder / RECORD_FILE, encoded(record))
    task = "translation" if cfg.is_pairs else "language_modeling"
    logger.info("%s is ready: --task %s trains on it", destination, task)


def check_counts(texts: Sequence[TextSet], counts: Sequence[TextCounts]) -> None:
    """Refuse a set without text, and sides that are not line by line translations.

    Raises:
        UserError: names the files.
    """
    for text, each in zip(texts, counts, strict=True):
        if not each.tokens:
            raise UserError(f"{text.path} has no text; give a file with some")
    if len({each.items for each in counts}) > 1:
        (first, second), (ours, theirs) = texts, counts
        raise UserError(
            f"{first.path} has {ours.items} lines and {second.path} has {theirs.items}; line n of "
            "one has to be the translation of line n of the other"
        )


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


def write_vocabularies(cfg: PreprocessConfig, folder: Path) -> dict[str, Any]:
    """Write the dictionaries and the tokenizer's files; return what the record says of them."""
    record: dict[str, Any] = {"tokenizer": None}
    pieces: list[tuple[str, int]] = []
    if cfg.has_tokenizer:
        tokenizer = load_tokenizer(
            cfg.tokenizer, cfg.vocab_filename, cfg.merges_filename, cfg.end_of_document_symbol
        )
        pieces = [(name, 1) for name in piece_names(tokenizer)]
        files = stored_names(tokenizer)
        record["tokenizer"] = BYTES if cfg.tokenizer == BYTES else sorted(files)
        record["end_of_document_symbol"] = cfg.end_of_document_symbol
        for name, source in files.items():
            write_file(folder / name, source.read_bytes())
    for plan in cfg.vocabularies():
        content = dictionary_content(plan, cfg, pieces)
        for name in plan.files:
            write_file(folder / name, content)
    write_file(folder / RECORD_FILE, encoded(record))
    return record


def dictionary_content(
    plan: VocabularyPlan, cfg: PreprocessConfig, pieces: list[tuple[str, int]]
) -> bytes:
    """A dictionary: the one that is given, or the tokenizer's pieces, or words.

    Raises:
        UserError: the one that is given lists nothing.
    """
    if plan.given is not None:
        if not read_fairseq_dictionary(Path(plan.given), plan.flag):
            raise UserError(f"{plan.flag} {plan.given} lists no symbol; give fairseq's dict.txt")
        return Path(plan.given).read_bytes()
    symbols = pieces or words_of(plan, cfg.workers)
    return dictionary_text(symbols, padding_factor=cfg.padding_factor).encode()


def stored_names(tokenizer: BaseTokenizer) -> dict[str, Path]:
    """The tokenizer's files by the names under which training looks for them."""
    if len(tokenizer.files) != 1:
        return tokenizer.files
    (path,) = tokenizer.files.values()
    return {ONE_FILE[path.suffix == ".json"]: path}


def words_of(plan: VocabularyPlan, num_workers: int) -> list[tuple[str, int]]:
    """The words of the files to train on, as a dictionary lists them."""
    words: Counter[str] = Counter()
    with OrderedWorkers(count_words, num_workers) as workers:
        for file in plan.texts:
            batches = workers.map(read_batches(file))
            for counted in shown(batches, file, f"counting words of {file.name}"):
                words.update(counted.words)
    return choose_words(words, threshold=plan.threshold, num_words=plan.num_words)


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
