"""BinarisedDataset: sequences of a split that fairseq's preprocessing or ours has binarised."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

import numpy as np

from scalerun.data.base_dataset import BaseDataset, DatasetCounts
from scalerun.data.batch import Batch
from scalerun.data.binarised.indexed_dataset import IndexedFile
from scalerun.data.collate import Collater
from scalerun.data.permutation import Purpose, permutation
from scalerun.data.streaming_dataset import DIGEST_DIGITS, SHOWN_DIGITS
from scalerun.data.text.digests import sampled_digest
from scalerun.data.token_block_dataset import Ints, Packing, TokenBlock, TokenBlockDataset
from scalerun.data.tokenizers.base_tokenizer import content_digest
from scalerun.data.tokenizers.dictionary import Dictionary
from scalerun.dataclass.errors import UserError

logger = logging.getLogger(__name__)

EPOCHS_KEPT = 2
"""Orders that are kept: an epoch's, and the next one's while its first batches are planned."""


class BinarisedDataset(BaseDataset[TokenBlock]):
    """The sequences of one split: one shard, whatever the number of its files.

    Items stay in the order of the files, since they may be the lines of one text. The sequences
    that are cut from them are the same in each epoch; their order is a function of (seed, epoch).
    Memory grows with the number of items, by about 30 bytes for each, not with their size.

    Args:
        name: the split, for messages.
        files: its files, in order.
        dictionary: vocabulary of the tokens.
        packing: how sequences are cut.
        seed: seed of the order; None keeps the order of the files, as validation sets do.
        collater: makes batches.
        num_bytes: UTF-8 bytes of the text; 0 where nobody counted them.

    Raises:
        UserError: there are no tokens.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[IndexedFile],
        dictionary: Dictionary,
        *,
        packing: Packing,
        seed: int | None,
        collater: Collater,
        num_bytes: int = 0,
    ) -> None:
        self._name = name
        self.packing = packing
        self.seed = seed
        self.collater = collater
        self.num_bytes = num_bytes
        self._dictionary = dictionary
        self._num_items = sum(file.num_documents for file in files)
        self._blocks = TokenBlockDataset(
            files,
            np.arange(self._num_items),
            packing,
            end_id=dictionary.eos,
            borders=_document_starts(files),
        )
        self._ordered: dict[int, TokenBlockDataset] = {}
        self._fingerprint = self._make_fingerprint(files)
        if not len(self._blocks):
            raise UserError(f"{name} has no tokens: {_names(files)}; binarise the text again")
        if self._blocks.num_dropped:
            logger.info(
                "%s: --sample-break-mode %s drops %d of %d tokens, at the end of long items",
                name, packing.break_mode, self._blocks.num_dropped, self._blocks.num_tokens,
            )  # fmt: skip

    @property
    def name(self) -> str:
        return self._name

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def ingredients(self) -> dict[str, str]:
        return {
            "the binarised text": f"digest {self._fingerprint.split('-')[0][:SHOWN_DIGITS]}",
            "dict.txt": f"digest {self._dictionary.digest[:SHOWN_DIGITS]}",
            "--sample-break-mode": self.packing.break_mode,
            "--tokens-per-sample": str(self.packing.tokens_per_sample),
            "--seed": str(self.seed),
        }

    def num_shards(self) -> int:
        return 1

    def shard(self, epoch: int, index: int) -> Sequence[TokenBlock]:
        if self.seed is None:
            return self._blocks
        if epoch not in self._ordered:
            blocks = copy.copy(self._blocks)
            blocks.reorder(permutation(len(blocks), self.seed, epoch, index, Purpose.BLOCKS))
            self._ordered[epoch] = blocks
            while len(self._ordered) > EPOCHS_KEPT:
                del self._ordered[next(iter(self._ordered))]
        return self._ordered[epoch]

    def collate(self, samples: Sequence[TokenBlock], sample_ids: Sequence[int]) -> Batch:
        return self.collater(samples, sample_ids)

    def counts(self) -> DatasetCounts:
        separators = self._blocks.num_separators
        return DatasetCounts(
            documents=self._num_items - separators,
            tokens=self._blocks.num_tokens - separators,
            num_bytes=self.num_bytes,
        )

    def num_samples(self) -> int | None:
        return len(self._blocks)

    def _make_fingerprint(self, files: Sequence[IndexedFile]) -> str:
        """Digest of the data, a dash, digest of the settings."""
        paths = [
            file.path.with_name(file.path.stem + s) for file in files for s in (".idx", ".bin")
        ]
        text = [f"{path.name} {sampled_digest(path)}" for path in paths]
        settings = [
            self._dictionary.digest,
            self.packing.settings(),
            repr(self.seed),
        ]
        return "-".join(content_digest(*part)[:DIGEST_DIGITS] for part in (text, settings))


def _names(files: Sequence[IndexedFile]) -> str:
    """The first file for a message, and how many more there are."""
    more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
    return f"nothing is in {files[0].path}{more}"


def _document_starts(files: Sequence[IndexedFile]) -> Ints:
    """Items at which a text begins, of those files that say so, numbered through the files."""
    starts, before = [np.empty(0, dtype=np.int64)], 0
    for file in files:
        if file.document_starts is not None:
            starts.append(file.document_starts + before)
        before += file.num_documents
    return np.concatenate(starts)
