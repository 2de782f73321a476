"""Fairseq's ``dict.txt``, and where its symbols stand in a tokenizer of ours."""

from __future__ import annotations

import re
from pathlib import Path

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from scalerun.dataclass.errors import UserError

BOS, PAD, EOS, UNK = range(4)
"""What fairseq puts before the symbols of the file."""
NUM_SPECIAL = 4
FILLER = "madeupword"
"""How the names of symbols begin that only fill a vocabulary up."""
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")
"""Counts, or the scores that sentencepiece exports in their place."""


def read_fairseq_dictionary(path: Path, flag: str = "--dict") -> dict[str, int]:
    """Number of each symbol that the file lists.

    Args:
        path: fairseq's ``dict.txt``.
        flag: what named the file, for messages; empty where nothing did.

    Raises:
        UserError: the file cannot be read, a line is not a symbol and a count, or a symbol is there
            twice.
    """
    name = f"{flag} {path}".lstrip()
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text") from error
    numbers: dict[str, int] = {}
    for i, line in enumerate(lines, start=1):
        if not line and i == len(lines):
            break
        symbol, _, count = line.rpartition(" ")
        if not symbol or not _NUMBER.fullmatch(count):
            raise UserError(f"{name}:{i} is {line!r}; a line is a symbol, a space, a count")
        if symbol in numbers:
            raise UserError(f"{name}:{i} has {symbol!r} a second time")
        numbers[symbol] = NUM_SPECIAL + len(numbers)
    return numbers


def rows_in_our_order(path: Path, tokenizer: BaseTokenizer, num_rows: int) -> list[int]:
    """For each id of a tokenizer, the row that fairseq's embedding has for it.

    Every row is used once, so that no probability changes: symbols that fairseq made up to fill its
    vocabulary become the fillers of ours.

    Args:
        path: fairseq's ``dict.txt``.
        tokenizer: the sentencepiece model whose pieces the file lists.
        num_rows: rows of the embedding.

    Raises:
        UserError: the two vocabularies are not the same one.
    """
    if not isinstance(tokenizer, SentencePieceTokenizer):
        raise UserError("--dict belongs to a sentencepiece model; give it with --tokenizer")
    numbers = read_fairseq_dictionary(path)
    if NUM_SPECIAL + len(numbers) != num_rows:
        raise UserError(
            f"--dict {path} gives {NUM_SPECIAL + len(numbers)} symbols ({NUM_SPECIAL} of fairseq's "
            f"own and {len(numbers)} lines), but the embedding has {num_rows} rows"
        )
    dictionary = tokenizer.dictionary
    special = {dictionary.bos: BOS, dictionary.pad: PAD, dictionary.eos: EOS}
    special |= {} if dictionary.unk is None else {dictionary.unk: UNK}
    order: list[int] = []
    for index in range(dictionary.num_real_symbols):
        piece = tokenizer.piece(index)
        row = special.get(index, numbers.get(piece))
        if row is None:
            raise UserError(
                f"--dict {path} has no {piece!r}, which --tokenizer {tokenizer.path} has; they are "
                "not one vocabulary"
            )
        order.append(row)
    left = sorted(set(range(num_rows)) - set(order))
    names = {number: symbol for symbol, number in numbers.items()}
    for row in left:
        if not names.get(row, "").startswith(FILLER):
            raise UserError(
                f"--dict {path} has {names.get(row, 'a special symbol')!r}, which --tokenizer "
                f"{tokenizer.path} does not have; they are not one vocabulary"
            )
    if len(order) + len(left) != len(dictionary) or len(set(order)) != len(order):
        raise UserError(
            f"the embedding has {num_rows} rows, but --tokenizer {tokenizer.path} has "
            f"{dictionary.num_real_symbols} symbols and asks for {len(dictionary)} rows; rows can "
            "be neither added nor dropped without changing probabilities: leave --tokenizer out"
        )
    return order + left
