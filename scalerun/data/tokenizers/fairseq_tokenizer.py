"""Tokenizers that speak in the numbers of a fairseq ``dict.txt``.

A folder of binarised text has a ``dict.txt``. It lists words, which spaces part, or the pieces of a
tokenizer whose file lies beside it: ``tokenizer.model`` (sentencepiece), ``tokenizer.json``, or
``vocab.json`` with ``merges.txt``. ``preprocess.json`` is there when scalerun made the folder.

Of two languages there is a ``dict.en.txt`` and a ``dict.es.txt``. A ``tokenizer.en.model`` is of
one of them, a ``tokenizer.model`` of both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer, Ids, content_digest
from scalerun.data.tokenizers.dictionary import Dictionary
from scalerun.data.tokenizers.fairseq_dictionary import (
    BOS,
    EOS,
    FILLER,
    NUM_SPECIAL,
    PAD,
    UNK,
    read_fairseq_dictionary,
)
from scalerun.data.tokenizers.tokenizer import BYTES, load_tokenizer
from scalerun.dataclass.errors import UserError

DICTIONARY_FILE = "dict.txt"
RECORD_FILE = "preprocess.json"
SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
"""The names of what stands at 0 to 3."""
ONE_FILE = ("tokenizer.model", "tokenizer.json")
TWO_FILES = ("vocab.json", "merges.txt")


class WordTokenizer(BaseTokenizer):
    """Words between white space, as fairseq reads text whose dictionary lists words.

    Args:
        numbers: number of each word.
        files: what a checkpoint must carry.
    """

    def __init__(self, numbers: dict[str, int], files: dict[str, Path]) -> None:
        self.files = files
        self.dictionary = _dictionary(numbers, "words")
        self._numbers = numbers
        self._names = [*SPECIAL_SYMBOLS, *numbers]

    def encode(self, text: str) -> list[int]:
        return [self._numbers.get(word, UNK) for word in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        dropped = self.dictionary.dropped_ids
        return " ".join(self.token_text(index) for index in ids if index not in dropped)

    def starts_word(self, index: int) -> bool:
        return True

    def token_text(self, index: int) -> str:
        return self._names[index] if index < len(self._names) else f"<filler {index}>"


class RenumberedTokenizer(BaseTokenizer):
    """A tokenizer whose pieces a ``dict.txt`` lists; pieces that it lacks are unknown.

    Args:
        inner: the tokenizer, with numbers of its own.
        numbers: number of each piece, by the names of :func:`piece_names`.
        files: what a checkpoint must carry, the list first.

    Raises:
        UserError: the list has a symbol that is no piece, nor made up to fill it.
    """

    def __init__(
        self, inner: BaseTokenizer, numbers: dict[str, int], files: dict[str, Path]
    ) -> None:
        self.inner = inner
        self.files = files
        self.dictionary = _dictionary(numbers, inner.digest)
        names = piece_names(inner)
        stray = numbers.keys() - names.keys()
        stray -= {symbol for symbol in stray if symbol.startswith(FILLER)}
        if stray:
            raise UserError(
                f"{next(iter(files.values()))} lists {min(stray)!r}, which is no piece of the "
                "tokenizer beside it; the two do not belong together"
            )
        self._numbers = np.full(len(inner.dictionary), UNK)
        self._inner_ids = {} if inner.dictionary.unk is None else {UNK: inner.dictionary.unk}
        for name, index in names.items():
            if name in numbers:
                self._numbers[index] = numbers[name]
                self._inner_ids[numbers[name]] = index

    def encode(self, text: str) -> list[int]:
        return self._renumbered(self.inner.encode(text)).tolist()

    def encode_batch(self, texts: Sequence[str], *, num_threads: int = 1) -> Sequence[Ids]:
        ids = self.inner.encode_batch(texts, num_threads=num_threads)
        return [self._renumbered(each) for each in ids]

    def decode(self, ids: Iterable[int]) -> str:
        known = (self._inner_ids.get(index) for index in ids)
        return self.inner.decode([index for index in known if index is not None])

    def token_text(self, index: int) -> str:
        if index < NUM_SPECIAL:
            return SPECIAL_SYMBOLS[index]
        inner = self._inner_ids.get(index)
        return f"<filler {index}>" if inner is None else self.inner.token_text(inner)

    def _renumbered(self, ids: Ids) -> np.ndarray[Any, Any]:
        return self._numbers[np.asarray(ids, dtype=np.int64)]


def piece_names(tokenizer: BaseTokenizer) -> dict[str, int]:
    """The id of each piece that text can have, by the name that stands for it in ``dict.txt``.

    It is the piece's own spelling, unless that would break a line or be one of fairseq's symbols.
    """
    own = tokenizer.dictionary
    roles = {own.bos, own.pad, own.eos, own.unk}
    names: dict[str, int] = {}
    for index in range(own.num_real_symbols):
        if index in roles:
            continue
        name = tokenizer.piece(index)
        if not name or name in SPECIAL_SYMBOLS or "\n" in name or "\r" in name:
            name = f"<piece {index}>"
        names[name] = index
    return names


def dictionary_file(language: str | None = None) -> str:
    """The name of a dictionary, or of that of one of two languages."""
    return DICTIONARY_FILE if language is None else f"dict.{language}.txt"


def tokenizer_file(name: str, language: str) -> str:
    """What one of :data:`ONE_FILE` is called that belongs to one of two languages."""
    stem, suffix = name.split(".")
    return f"{stem}.{language}.{suffix}"


def load_vocabulary(folder: Path, language: str | None = None) -> BaseTokenizer:
    """The tokenizer of a folder of binarised text, or of the assets of a checkpoint.

    Args:
        language: which one, in a folder of two.

    Raises:
        UserError: there is no dictionary, or a file is damaged, or they do not fit each other.
    """
    listing = dictionary_file(language)
    path = folder / listing
    if not path.is_file():
        raise UserError(
            f"{folder} has no {listing}; give a folder that scalerun.cli.preprocess or "
            "fairseq-preprocess made"
        )
    numbers = read_fairseq_dictionary(path, flag="")
    files = {listing: path}
    record = read_record(folder)
    if record:
        files[RECORD_FILE] = folder / RECORD_FILE
    end_symbol = record.get("end_of_document_symbol")
    if record.get("tokenizer") == BYTES:
        return RenumberedTokenizer(load_tokenizer(BYTES), numbers, files)
    own = () if language is None else tuple(tokenizer_file(name, language) for name in ONE_FILE)
    for name in (*own, *ONE_FILE):
        if (folder / name).is_file():
            files[name] = folder / name
            inner = load_tokenizer(str(files[name]), end_of_document_symbol=end_symbol)
            return RenumberedTokenizer(inner, numbers, files)
    if all((folder / name).is_file() for name in TWO_FILES):
        files |= {name: folder / name for name in TWO_FILES}
        vocab, merges = (str(folder / name) for name in TWO_FILES)
        inner = load_tokenizer(None, vocab, merges, end_symbol)
        return RenumberedTokenizer(inner, numbers, files)
    return WordTokenizer(numbers, files)


def read_record(folder: Path) -> dict[str, Any]:
    """What ``scalerun.cli.preprocess`` noted about a folder; empty where it did not make it.

    Raises:
        UserError: the note cannot be read.
    """
    path = folder / RECORD_FILE
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); make the folder again") from error
    if not isinstance(record, dict):
        raise UserError(f"{path} is not a JSON object; make the folder again")
    return record


def _dictionary(numbers: dict[str, int], *kind: str) -> Dictionary:
    return Dictionary(
        num_real_symbols=NUM_SPECIAL + len(numbers),
        bos=BOS,
        pad=PAD,
        eos=EOS,
        unk=UNK,
        digest=content_digest("fairseq", *kind, *numbers),
    )
