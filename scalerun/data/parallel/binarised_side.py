"""A side of pairs that was binarised before: items of one file, or of several in a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalerun.data.binarised.indexed_dataset import AGAIN, IndexedFile
from scalerun.data.length_batches import Numbers
from scalerun.data.parallel.side import Longest, Side
from scalerun.data.text.digests import sampled_digest
from scalerun.data.text.jsonl_dataset import QuarantinedRecord
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer, content_digest
from scalerun.data.tokenizers.fairseq_tokenizer import dictionary_file, read_record
from scalerun.dataclass.errors import UserError


class BinarisedRows:
    """The items of files, one file behind the other, as they are mapped into memory.

    Args:
        files: in order.
        end_id: the end symbol, which every item has to end with.
        total_bytes: UTF-8 bytes of all text; 0 where nobody counted them.

    Raises:
        UserError: an item has no tokens at all.
    """

    unit = "item"
    quarantined: Sequence[QuarantinedRecord] = ()

    def __init__(self, files: Sequence[IndexedFile], *, end_id: int, total_bytes: int = 0) -> None:
        self.files = files
        self.end_id = end_id
        self.total_bytes = total_bytes
        self.lengths_N = np.concatenate([np.diff(file.ends) for file in files])
        self.has_text_N = self.lengths_N > 1
        self._starts = np.cumsum([0, *(file.num_documents for file in files)])
        for index in np.flatnonzero(self.lengths_N == 0)[:1]:
            raise UserError(f"{self.where(int(index))} has no token, not even </s>; {AGAIN}")

    def row(self, index: int) -> npt.NDArray[Any]:
        """The tokens of an item (from 0, through all files).

        Raises:
            UserError: a token is not in the dictionary, or the last one does not end the item.
        """
        file, own = self._find(index)
        tokens = file.tokens[file.ends[own] : file.ends[own + 1]]
        if tokens[-1] != self.end_id:
            raise UserError(
                f"{self.where(index)} ends with the token {tokens[-1]}, not with </s> "
                f"({self.end_id}); binarise the text again, with an end for each line"
            )
        return tokens

    def place(self, index: int) -> tuple[str, int]:
        """The name of the ``.bin`` file, and the item from 1."""
        file, own = self._find(index)
        return file.path.name, own + 1

    def where(self, index: int) -> str:
        """``path, item n``."""
        file, own = self._find(index)
        return f"{file.path}, item {own + 1}"

    def num_bytes(self, used: Numbers) -> int:
        """UTF-8 bytes of some items: of those with text all, or nobody counted them."""
        return self.total_bytes if self.has_text_N[used].sum() == self.has_text_N.sum() else 0

    def _find(self, index: int) -> tuple[IndexedFile, int]:
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.files[file], index - int(self._starts[file])


def binarised_side(
    prefixes: Sequence[Path], tokenizer: BaseTokenizer, longest: Longest, *, language: str
) -> Side:
    """A side that is a row of binarised files.

    Args:
        prefixes: what their names begin with.
        tokenizer: the vocabulary of the tokens.
        language: whose dictionary it is, for messages.

    Raises:
        UserError: a file is missing or damaged.
    """
    own = tokenizer.dictionary
    files = [
        IndexedFile.open(
            prefix, num_symbols=own.num_real_symbols, dictionary=dictionary_file(language)
        )
        for prefix in prefixes
    ]
    known = read_record(prefixes[0].parent).get("sets", {})
    counted = [known.get(prefix.name, {}).get("bytes", 0) for prefix in prefixes]
    rows = BinarisedRows(files, end_id=own.eos, total_bytes=sum(counted) if all(counted) else 0)
    paths = [p.with_name(p.name + suffix) for p in prefixes for suffix in (".idx", ".bin")]
    digest = content_digest(*(f"{path.name} {sampled_digest(path)}" for path in paths))
    return Side(rows, files[0].path, digest, tokenizer, longest)
