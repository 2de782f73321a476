"""SentenceBlocks: the documents of one shard, packed sentence by sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scalerun.data.text.token_file import TokenFile
from scalerun.data.token_block_dataset import COMPLETE_DOC, Ints, Packing, whole_units
from scalerun.data.tokenizers.dictionary import Dictionary


class SentenceBlocks:
    """Sequences of whole sentences: ``<s>``, then sentences, each with its ``</s>``.

    A sequence takes sentences until the next one does not fit; in the mode ``complete_doc`` it
    also ends with its document. A sentence that would not fit into a sequence of its own is left
    out.

    Args:
        files: token files of the shard.
        documents: (N,) which documents, in which order; repeats are allowed.
        packing: how they are cut.
        dictionary: knows the special symbols.

    Attributes:
        num_tokens: tokens of the documents.
        num_dropped: those of them in sentences that are left out.
        long_lengths: tokens of each such sentence of the shard, however often it is chosen.
        first_long: the first of them: number of its file, and its number in there; None for none.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        documents: Ints,
        packing: Packing,
        *,
        dictionary: Dictionary,
    ) -> None:
        self._files = files
        self._bos = dictionary.bos
        self._first_tokens = np.cumsum([0] + [file.num_tokens for file in files])
        ends = [np.flatnonzero(file.tokens == dictionary.eos) + 1 for file in files]
        of_shard = np.concatenate(
            [np.zeros(1, dtype=np.int64)]
            + [each + start for each, start in zip(ends, self._first_tokens, strict=False)]
        )
        borders = np.concatenate(
            [np.zeros(1, dtype=np.int64)]
            + [f.ends[1:] + start for f, start in zip(files, self._first_tokens, strict=False)]
        )
        first = np.searchsorted(of_shard, borders)  # sentence of each document
        counts = np.diff(first)[documents]
        before = np.cumsum(counts) - counts
        chosen = np.arange(int(counts.sum())) + np.repeat(first[:-1][documents] - before, counts)
        lengths = np.diff(of_shard)[chosen]
        fits = lengths < packing.tokens_per_sample
        self._starts = of_shard[chosen[fits]]
        self._lengths = lengths[fits]
        cumulative = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self._lengths)])
        stops = None
        if packing.break_mode == COMPLETE_DOC:
            document = np.repeat(np.arange(len(documents)), counts)[fits]
            stops = np.searchsorted(document, document, side="right")
        self._borders = whole_units(cumulative, packing.tokens_per_sample - 1, stops)
        self.num_tokens = int(lengths.sum())
        self.num_dropped = int(lengths[~fits].sum())
        all_lengths = np.diff(of_shard)
        is_long = all_lengths >= packing.tokens_per_sample
        self.long_lengths = all_lengths[is_long]
        self.first_long: tuple[int, int] | None = None
        if is_long.any():
            counts_F = np.cumsum([len(each) for each in ends])
            first_long = int(is_long.argmax())
            file = int(np.searchsorted(counts_F, first_long, side="right"))
            self.first_long = file, first_long - int(counts_F[file] - len(ends[file]))

    def __len__(self) -> int:
        return len(self._borders) - 1

    def tokens(self, number: int) -> npt.NDArray[Any]:
        """(n,) the tokens of one sequence."""
        parts = [np.array([self._bos], dtype=self._files[0].tokens.dtype)]
        for i in range(int(self._borders[number]), int(self._borders[number + 1])):
            start, length = int(self._starts[i]), int(self._lengths[i])
            which = int(np.searchsorted(self._first_tokens, start, side="right")) - 1
            offset = start - int(self._first_tokens[which])
            parts.append(self._files[which].tokens[offset : offset + length])
        return np.concatenate(parts)
