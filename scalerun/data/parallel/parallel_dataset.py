"""ParallelDataset: line n of one text file and its translation, line n of another.

N pairs, B pairs of a batch, M source tokens, T target tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from scalerun.data.base_dataset import BaseDataset, DatasetCounts
from scalerun.data.batch import IGNORE_INDEX, Batch
from scalerun.data.length_batches import (
    BatchLimits,
    LengthBatch,
    LengthBatches,
    Numbers,
    padding_share,
)
from scalerun.data.text.jsonl_dataset import MAX_QUARANTINED_CHARACTERS, QuarantinedRecord
from scalerun.data.text.quarantine import QuarantineFile
from scalerun.data.text.segment_dataset import SegmentFile
from scalerun.data.text.token_cache import TokenCache
from scalerun.data.text.token_file import TokenFile
from scalerun.data.tokenizers.base_tokenizer import content_digest
from scalerun.dataclass.errors import UserError

logger = logging.getLogger(__name__)

SHOWN_DIGITS = 8
DIGEST_DIGITS = 16


@dataclass(frozen=True)
class Side:
    """Sources, or targets."""

    file: SegmentFile
    cache: TokenCache
    max_positions: int | None
    """Longest sequence that the model takes, its end symbol included."""
    positions_flag: str


@dataclass(frozen=True)
class ParallelRecipe:
    """What decides which batches there are, apart from the text and the tokenizers."""

    limits: BatchLimits
    seed: int | None
    """Seed of the order; None keeps the order of lengths, as validation sets do."""
    skip_bad_records: bool = False


class ParallelDataset(BaseDataset[LengthBatch]):
    """Pairs of lines, in batches of pairs of similar length.

    A source ends with the end symbol. A target ends with it, and the decoder's input begins with
    it. Pairs of blank lines are left out.

    Args:
        name: of the split.
        source: what is read.
        target: what is predicted.
        recipe: sizes and order of the batches.
        quarantine: where bad records are listed.

    Raises:
        UserError: a file cannot be read, the files have different numbers of lines, or a pair
            cannot be used: one side is empty, or too long for the model or a batch.
    """

    whole_batches = True

    def __init__(
        self,
        name: str,
        source: Side,
        target: Side,
        *,
        recipe: ParallelRecipe,
        quarantine: QuarantineFile,
    ) -> None:
        self._name = name
        self.sides = (source, target)
        self.recipe = recipe
        self.quarantine = quarantine
        self._texts = tuple(side.cache.load(side.file) for side in self.sides)
        self._digests = [side.cache.digests.whole(side.file.path) for side in self.sides]
        for side in self.sides:
            side.cache.digests.save()
        self._check_line_counts()
        self.lines, bad = self._sort_out()
        """(N,) lines, from 0, of the pairs that can be used."""
        self._report(bad)
        self.bad = bad
        """Pairs that were left out for what is wrong with them."""
        self.lengths_NS = np.stack([np.diff(text.ends)[self.lines] for text in self._texts], 1)
        """(N, 2) tokens of source and target, with their end symbols."""
        if not len(self.lines):
            raise UserError(
                f"{source.file.path} and {target.file.path} have no pair of lines; put a sentence "
                "and its translation on each line"
            )
        self._epochs: dict[int, LengthBatches] = {}
        self._num_batches = len(self.shard(1, 0))

    @property
    def name(self) -> str:
        return self._name

    @property
    def fingerprint(self) -> str:
        text = [*self._digests, self._left_out_digest()]
        recipe = self.recipe
        settings = [
            *(side.cache.tokenizer.digest for side in self.sides),
            repr((recipe.seed, *(getattr(recipe.limits, f.name) for f in fields(recipe.limits)))),
        ]
        return "-".join(content_digest(*part)[:DIGEST_DIGITS] for part in (text, settings))

    @property
    def ingredients(self) -> dict[str, str]:
        limits = self.recipe.limits
        source, target = (side.cache.tokenizer.digest[:SHOWN_DIGITS] for side in self.sides)
        left_out = len(self._texts[0].document_bytes) - len(self.lines)
        return {
            "the text of the source": f"digest {self._digests[0][:SHOWN_DIGITS]}",
            "the text of the target": f"digest {self._digests[1][:SHOWN_DIGITS]}",
            "what is left out": f"{left_out} pairs, digest {self._left_out_digest()}",
            "the source's tokenizer": f"digest {source}",
            "the target's tokenizer": f"digest {target}",
            "--seed": str(self.recipe.seed),
            "--batch-size": str(limits.max_sentences or "none"),
            "--max-tokens": str(limits.max_tokens or "none"),
            "--required-batch-size-multiple": str(limits.multiple),
        }

    def num_shards(self) -> int:
        return 1

    def shard(self, epoch: int, index: int) -> LengthBatches:
        seed = self.recipe.seed
        epoch = epoch if seed is not None else 1
        if epoch not in self._epochs:
            key = None if seed is None else (seed, epoch)
            self._epochs = {epoch: LengthBatches(self.lengths_NS, self.recipe.limits, key=key)}
        return self._epochs[epoch]

    def collate(self, samples: Sequence[LengthBatch], sample_ids: Sequence[int]) -> Batch:
        """As in :class:`BaseDataset`; the batch's ids are places of pairs in the epoch."""
        lines = [int(line) for batch in samples for line in self.lines[batch.members]]
        ids = [batch.first + i for batch in samples for i in range(len(batch.members))]
        sources, targets = ([_segment(text, line) for line in lines] for text in self._texts)
        source_pad, target_pad = (side.cache.tokenizer.dictionary.pad for side in self.sides)
        end = self.sides[1].cache.tokenizer.dictionary.eos
        inputs = [np.concatenate(([end], target[:-1])) for target in targets]
        return Batch(
            tokens=torch.from_numpy(_stack(inputs, target_pad)),
            targets=torch.from_numpy(_stack(targets, IGNORE_INDEX)),
            num_targets=sum(map(len, targets)),
            sample_ids=ids,
            source=torch.from_numpy(_stack(sources, source_pad)),
        )

    def counts(self) -> DatasetCounts:
        return DatasetCounts(
            documents=len(self.lines),
            tokens=int(self.lengths_NS[:, 1].sum()),
            num_bytes=int(self._texts[1].document_bytes[self.lines].sum()),
        )

    def num_samples(self) -> int:
        return self._num_batches

    def describe(self) -> dict[str, Any]:
        """Totals, for the log."""
        source_tokens, target_tokens = self.lengths_NS.sum(axis=0)
        batches = self.shard(1, 0)
        return {
            "event": "data",
            "subset": self.name,
            "pairs": len(self.lines),
            "pairs_blank": len(self._texts[0].document_bytes) - len(self.lines) - len(self.bad),
            "pairs_bad": len(self.bad),
            "source_tokens": int(source_tokens),
            "tokens": int(target_tokens),
            "batches": len(batches),
            "padding": round(padding_share(batches, self.lengths_NS), 4),
            "fingerprint": self.fingerprint,
        }

    def _left_out_digest(self) -> str:
        used = np.zeros(len(self._texts[0].document_bytes), dtype=bool)
        used[self.lines] = True
        return content_digest(np.packbits(used).tobytes())[:SHOWN_DIGITS]

    def _check_line_counts(self) -> None:
        numbers = [text.num_documents for text in self._texts]
        if numbers[0] != numbers[1]:
            paths = [side.file.path for side in self.sides]
            raise UserError(
                f"{paths[0]} has {numbers[0]} lines and {paths[1]} has {numbers[1]}; line n of "
                "one has to be the translation of line n of the other"
            )

    def _sort_out(self) -> tuple[Numbers, list[QuarantinedRecord]]:
        """The lines that can be used, and what is wrong with the others but for blank pairs."""
        bad = {record.line - 1: record for text in self._texts for record in text.quarantined}
        for line, reason, side in self._faults():
            bad.setdefault(line, self._record(line, reason, side))
        empty = [text.document_bytes == 0 for text in self._texts]
        used = ~(empty[0] & empty[1])
        used[list(bad)] = False
        return np.flatnonzero(used).astype(np.int64), [bad[line] for line in sorted(bad)]

    def _faults(self) -> Iterator[tuple[int, str, Side]]:
        """Pairs that cannot be used: line from 0, the reason, and which side it is about."""
        for own, other in ((0, 1), (1, 0)):
            text, side = self._texts[own], self.sides[own]
            empty = (text.document_bytes == 0) & (self._texts[other].document_bytes > 0)
            there = self.sides[other].file.path.name
            for line in np.flatnonzero(empty):
                yield int(line), f"the line is empty, and that of {there} is not", side
            lengths = np.diff(text.ends)
            limits = {
                side.positions_flag: side.max_positions,
                "--max-tokens": self.recipe.limits.max_tokens,
            }
            for flag, limit in limits.items():
                if limit is not None:
                    for line in np.flatnonzero(lengths > limit):
                        yield int(line), f"{lengths[line]} tokens are above {flag} {limit}", side

    def _record(self, line: int, reason: str, side: Side) -> QuarantinedRecord:
        texts = [
            each.cache.tokenizer.decode(_segment(text, line)[:-1].tolist())
            for each, text in zip(self.sides, self._texts, strict=True)
        ]
        shown = " ||| ".join(texts)[:MAX_QUARANTINED_CHARACTERS]
        return QuarantinedRecord(side.file.name, line + 1, reason, shown)

    def _report(self, bad: Sequence[QuarantinedRecord]) -> None:
        """List bad records, or stop at the first."""
        if not bad:
            return
        if not self.recipe.skip_bad_records:
            first = bad[0]
            [path] = {s.file.path for s in self.sides if s.file.name == first.file}
            raise UserError(
                f"{path}:{first.line}: {first.reason}; repair it, or leave bad records out with "
                "--bad-records skip"
            )
        for side in self.sides:
            self.quarantine.add([record for record in bad if record.file == side.file.name])


def _segment(text: TokenFile, line: int) -> npt.NDArray[Any]:
    """The tokens of a line (from 0), with the end symbol."""
    return text.tokens[text.ends[line] : text.ends[line + 1]]


def _stack(rows: Sequence[npt.NDArray[Any]], filler: int) -> Numbers:
    """(B, longest) of rows of any length; of none, one row with one place."""
    length = max(map(len, rows), default=1)
    table = np.full((max(len(rows), 1), length), filler, dtype=np.int64)
    for place, row in zip(table, rows, strict=False):
        place[: len(row)] = row
    return table
