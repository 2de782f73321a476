"""ParallelDataset: a row of one side and its translation, the same row of the other.

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
from scalerun.data.parallel.side import Side, check_numbers
from scalerun.data.text.jsonl_dataset import MAX_QUARANTINED_CHARACTERS, QuarantinedRecord
from scalerun.data.text.quarantine import QuarantineFile
from scalerun.data.tokenizers.base_tokenizer import content_digest
from scalerun.dataclass.errors import UserError

logger = logging.getLogger(__name__)

SHOWN_DIGITS = 8
DIGEST_DIGITS = 16


@dataclass(frozen=True)
class ParallelRecipe:
    """What decides which batches there are, apart from the text and the tokenizers."""

    limits: BatchLimits
    seed: int | None
    """Seed of the order; None keeps the order of lengths, as validation sets do."""
    skip_bad_records: bool = False


class ParallelDataset(BaseDataset[LengthBatch]):
    """Pairs of lines, or of binarised items, in batches of pairs of similar length.

    A source ends with the end symbol. A target ends with it, and the decoder's input begins with
    it. Pairs of blank lines are left out.

    Args:
        name: of the split.
        source: what is read.
        target: what is predicted.
        recipe: sizes and order of the batches.
        quarantine: where bad records are listed.

    Raises:
        UserError: the sides have different numbers of rows, or a pair cannot be used: one side is
            empty, or too long for the model or a batch.
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
        self.num_rows = len(source.rows.lengths_N)
        """Of each side, those included that are left out."""
        check_numbers(source, target)
        self.lines, bad = self._sort_out()
        """(N,) rows, from 0, of the pairs that can be used."""
        self._report(bad)
        self.bad = [record for record, _ in bad]
        """Pairs that were left out for what is wrong with them."""
        self.lengths_NS = np.stack([side.rows.lengths_N[self.lines] for side in self.sides], 1)
        """(N, 2) tokens of source and target, with their end symbols."""
        if not len(self.lines):
            raise UserError(
                f"{source.path} and {target.path} have no pair of {source.rows.unit}s; "
                "each side needs a sentence where the other has one"
            )
        self._epochs: dict[int, LengthBatches] = {}
        self._num_batches = len(self.shard(1, 0))

    @property
    def name(self) -> str:
        return self._name

    @property
    def fingerprint(self) -> str:
        text = [*(side.digest for side in self.sides), self._left_out_digest()]
        recipe = self.recipe
        settings = [
            *(side.tokenizer.digest for side in self.sides),
            repr((recipe.seed, *(getattr(recipe.limits, f.name) for f in fields(recipe.limits)))),
        ]
        return "-".join(content_digest(*part)[:DIGEST_DIGITS] for part in (text, settings))

    @property
    def ingredients(self) -> dict[str, str]:
        limits = self.recipe.limits
        source, target = (side.tokenizer.digest[:SHOWN_DIGITS] for side in self.sides)
        left_out = self.num_rows - len(self.lines)
        return {
            "the text of the source": f"digest {self.sides[0].digest[:SHOWN_DIGITS]}",
            "the text of the target": f"digest {self.sides[1].digest[:SHOWN_DIGITS]}",
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
        sources, targets = ([side.rows.row(line) for line in lines] for side in self.sides)
        source_pad, target_pad = (side.tokenizer.dictionary.pad for side in self.sides)
        end = self.sides[1].tokenizer.dictionary.eos
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
            num_bytes=self.sides[1].rows.num_bytes(self.lines),
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
            "pairs_blank": self.num_rows - len(self.lines) - len(self.bad),
            "pairs_bad": len(self.bad),
            "source_tokens": int(source_tokens),
            "tokens": int(target_tokens),
            "batches": len(batches),
            "padding": round(padding_share(batches, self.lengths_NS), 4),
            "fingerprint": self.fingerprint,
        }

    def _left_out_digest(self) -> str:
        used = np.zeros(self.num_rows, dtype=bool)
        used[self.lines] = True
        return content_digest(np.packbits(used).tobytes())[:SHOWN_DIGITS]

    def _sort_out(self) -> tuple[Numbers, list[tuple[QuarantinedRecord, str]]]:
        """The rows that can be used; what is wrong with the others but for blank pairs, and where.

        The place is for a message.
        """
        bad = {
            record.line - 1: (record, side.rows.where(record.line - 1))
            for side in self.sides
            for record in side.rows.quarantined
        }
        for row, reason, side in self._faults():
            if row not in bad:
                bad[row] = self._record(row, reason, side), side.rows.where(row)
        source, target = (side.rows.has_text_N for side in self.sides)
        used = source | target
        used[list(bad)] = False
        return np.flatnonzero(used).astype(np.int64), [bad[row] for row in sorted(bad)]

    def _faults(self) -> Iterator[tuple[int, str, Side]]:
        """Pairs that cannot be used: row from 0, the reason, and which side it is about."""
        for own, other in ((0, 1), (1, 0)):
            side, rows, others = self.sides[own], self.sides[own].rows, self.sides[other].rows
            for row in np.flatnonzero(~rows.has_text_N & others.has_text_N):
                there = others.place(int(row))[0]
                yield int(row), f"the {rows.unit} is empty, and that of {there} is not", side
            limits = {
                side.longest.flag: side.longest.tokens,
                "--max-tokens": self.recipe.limits.max_tokens,
            }
            for flag, limit in limits.items():
                if limit is not None:
                    for row in np.flatnonzero(rows.lengths_N > limit):
                        length = rows.lengths_N[row]
                        yield int(row), f"{length} tokens are above {flag} {limit}", side

    def _record(self, row: int, reason: str, side: Side) -> QuarantinedRecord:
        shown = " ||| ".join(each.text(row) for each in self.sides)[:MAX_QUARANTINED_CHARACTERS]
        return QuarantinedRecord(*side.rows.place(row), reason, shown)

    def _report(self, bad: Sequence[tuple[QuarantinedRecord, str]]) -> None:
        """List bad records, or stop at the first."""
        if not bad:
            return
        first, where = bad[0]
        if not self.recipe.skip_bad_records:
            raise UserError(
                f"{where}: {first.reason}; repair it, or leave bad records out with "
                "--bad-records skip"
            )
        for file in dict.fromkeys(record.file for record, _ in bad):
            self.quarantine.add([record for record, _ in bad if record.file == file])


def _stack(rows: Sequence[npt.NDArray[Any]], filler: int) -> Numbers:
    """(B, longest) of rows of any length; of none, one row with one place."""
    length = max(map(len, rows), default=1)
    table = np.full((max(len(rows), 1), length), filler, dtype=np.int64)
    for place, row in zip(table, rows, strict=False):
        place[: len(row)] = row
    return table
