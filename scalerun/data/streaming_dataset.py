"""StreamingTextDataset: text files to sequences, shard by shard, without holding the corpus."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scalerun.data.base_dataset import BaseDataset, DatasetCounts
from scalerun.data.batch import Batch
from scalerun.data.collate import Collate
from scalerun.data.mixture_dataset import Mixture, corpus_sizes
from scalerun.data.permutation import Purpose, permutation
from scalerun.data.text.document_kind import PLAIN_TEXT
from scalerun.data.text.jsonl_dataset import QuarantinedRecord, ReadCounts
from scalerun.data.text.layout import Split, TextFile
from scalerun.data.text.preparation import BackgroundPreparation
from scalerun.data.text.quarantine import QuarantineFile
from scalerun.data.text.token_cache import TokenCache
from scalerun.data.text.token_file import TokenFile
from scalerun.data.token_block_dataset import BlockDataset, Ints, Packing, TokenBlockDataset
from scalerun.data.tokenizers.base_tokenizer import content_digest
from scalerun.dataclass.errors import UserError

logger = logging.getLogger(__name__)

SHARDS_KEPT_OPEN = 3
"""The current one, the next, and the first, which validation sets and short corpora return to."""
DIGEST_DIGITS = 16
SHOWN_DIGITS = 8


@dataclass(frozen=True)
class ShardSummary:
    """What a shard was found to hold, before any corpus is repeated or sampled."""

    lines: ReadCounts
    documents: int
    tokens: int
    """Targets."""
    num_bytes: int


@dataclass(frozen=True)
class Recipe:
    """What decides which sequences there are, apart from the text and the tokenizer."""

    packing: Packing
    seed: int | None
    """Seed of the order; None keeps the order of the files, as validation sets do."""
    mixture: Mixture = field(default_factory=Mixture)


class StreamingTextDataset(BaseDataset[Any]):
    """The sequences of one split.

    Within a shard, documents are permuted and cut into sequences, which are permuted again; both
    orders are functions of (seed, epoch, shard). Only the shards at hand are open.

    Args:
        split: its files.
        cache: gives their tokens.
        recipe: cutting, order and shares.
        collater: makes batches.
        quarantine: where bad records are listed.
    """

    def __init__(
        self,
        split: Split,
        cache: TokenCache,
        *,
        recipe: Recipe,
        collater: Collate,
        quarantine: QuarantineFile,
    ) -> None:
        recipe.mixture.check_names(split.corpora)
        self.split = split
        self.cache = cache
        self.recipe = recipe
        self.collater = collater
        self.quarantine = quarantine
        self.summaries: dict[int, ShardSummary] = {}
        """By shard, of those that were read so far."""
        self.reports: list[dict[str, Any]] = []
        """What was found while reading, for whoever logs events; the reader empties it."""
        self._digests: dict[TextFile, str] = {}
        self._prefetched: set[int] = set()
        self._num_samples: dict[int, int] = {}
        self._background = BackgroundPreparation(cache)
        self._open_files: OrderedDict[int, list[TokenFile]] = OrderedDict()
        self._open_shards: OrderedDict[tuple[int, int], BlockDataset[Any]] = OrderedDict()
        self._fingerprint = self._make_fingerprint()
        self._survey()

    @property
    def name(self) -> str:
        return self.split.name

    @property
    def place(self) -> str:
        folders = sorted({str(file.path.parent) for file in self.split.shards[0]})
        return f"{self.name} ({', '.join(folders)})"

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def ingredients(self) -> dict[str, str]:
        packing, mixture, part = self.recipe.packing, self.recipe.mixture, self.cache.part
        weights = ",".join(f"{name}={share}" for name, share in sorted(mixture.weights.items()))
        return {
            "the training text": f"digest {self._fingerprint.split('-')[0][:SHOWN_DIGITS]}",
            "--tokenizer": f"digest {self.cache.tokenizer.digest[:SHOWN_DIGITS]}",
            "--sample-break-mode": packing.break_mode,
            "--tokens-per-sample": str(packing.tokens_per_sample),
            "the kind of documents": self.cache.kind.name,
            "--seed": str(self.recipe.seed),
            "--corpus-weights": weights or "none",
            "--multicorpus-sampling-alpha": str(mixture.alpha),
            "--valid-fraction": str(part.fraction if part is not None else 0.0),
        }

    def num_shards(self) -> int:
        return len(self.split.shards)

    def open_first(self) -> None:
        """Read the first shard, so that what is wrong with it is known before training starts.

        Raises:
            UserError: it cannot be read, or it is the only one and empty.
        """
        self._files(0)
        if self.num_shards() == 1 and not self.summaries[0].documents:
            lines = self.lines()
            if lines.other_part:
                raise UserError(
                    f"{self.place} has no documents: all {lines.other_part} are on the other side "
                    "of --valid-fraction; choose another share, or make the folders train and valid"
                )
            raise UserError(
                f"{self.place} has no documents: {lines.lines} lines, of which {lines.blank} "
                f"blank, {lines.empty} empty and {lines.quarantined} bad; check the text files"
            )

    def shard(self, epoch: int, index: int) -> Sequence[Any]:
        key = (epoch if self.recipe.seed is not None else 1, index)
        if key not in self._open_shards:
            self._open_shards[key] = self._arrange(epoch, index)
            while len(self._open_shards) > SHARDS_KEPT_OPEN:
                self._open_shards.popitem(last=False)
        return self._open_shards[key]

    def prefetch(self, index: int) -> None:
        if index in self.summaries or index in self._prefetched:
            return
        if self._background.start(self.split.shards[index]):
            self._prefetched.add(index)

    def collate(self, samples: Sequence[Any], sample_ids: Sequence[int]) -> Batch:
        return self.collater(samples, sample_ids)

    def counts(self) -> DatasetCounts:
        found = self.summaries.values()
        return DatasetCounts(
            documents=sum(summary.documents for summary in found),
            tokens=sum(summary.tokens for summary in found),
            num_bytes=sum(summary.num_bytes for summary in found),
        )

    def num_samples(self) -> int | None:
        if len(self._num_samples) < self.num_shards():
            return None
        return sum(self._num_samples.values())

    def lines(self) -> ReadCounts:
        """What became of the lines of the shards that were read so far."""
        return sum((summary.lines for summary in self.summaries.values()), ReadCounts())

    def _make_fingerprint(self) -> str:
        """Digest of the data, a dash, digest of the settings."""
        digests = self.cache.digests
        for shard in self.split.shards:
            self._digests.update({file: digests.sampled(file.path) for file in shard})
        digests.save()
        text = [
            f"{i} {file.name} {self._digests[file]}"
            for i, files in enumerate(self.split.shards)
            for file in files
        ]
        return "-".join(content_digest(*each)[:DIGEST_DIGITS] for each in (text, self._settings()))

    def _settings(self) -> list[str]:
        """What decides which sequences there are, apart from the text."""
        recipe = self.recipe
        settings = [
            self.cache.tokenizer.digest,
            recipe.packing.settings(),
            repr((recipe.seed, sorted(recipe.mixture.weights.items()), recipe.mixture.alpha)),
        ]
        if self.cache.part is not None:
            settings.append(repr(self.cache.part))
        if self.cache.kind is not PLAIN_TEXT:
            settings.append(self.cache.kind.name)
        return settings

    def _survey(self) -> None:
        """Look at the shards that the cache holds already, so that totals are known early."""
        for index, files in enumerate(self.split.shards):
            tokens = [self.cache.peek(file) for file in files]
            present = [each for each in tokens if each is not None]
            if len(present) == len(files):
                self._summarise(index, present)

    def _summarise(self, index: int, files: Sequence[TokenFile]) -> None:
        for file in files:
            self._report_bad_records(file.quarantined)
        if self.recipe.packing.break_mode == "none" and self.recipe.mixture.is_plain:
            tokens = sum(file.num_tokens for file in files)
            self._num_samples[index] = self.recipe.packing.num_sequences(tokens)
        self.summaries[index] = ShardSummary(
            lines=sum((file.counts for file in files), ReadCounts()),
            documents=sum(file.num_documents for file in files),
            tokens=sum(file.num_targets for file in files),
            num_bytes=sum(file.num_bytes for file in files),
        )

    def _files(self, index: int) -> list[TokenFile]:
        if index not in self._open_files:
            names = self.split.shards[index]
            files = [self._load(file) for file in names]
            self.cache.digests.save()
            if index not in self.summaries:
                self._summarise(index, files)
                self._log_summary(index)
            self._log_mixture(index, files)
            self._open_files[index] = files
            while len(self._open_files) > SHARDS_KEPT_OPEN:
                self._open_files.popitem(last=False)
        return self._open_files[index]

    def _load(self, file: TextFile) -> TokenFile:
        tokens = self.cache.load(file)
        if self.cache.digests.sampled(file.path) != self._digests[file]:
            raise UserError(
                f"{file.path} changed since this run started; undo the change and start it again, "
                "or start a new run from it: --save-dir NEW --restore-file OLD --reset-dataloader"
            )
        return tokens

    def _arrange(self, epoch: int, index: int) -> BlockDataset[Any]:
        files = self._files(index)
        seed = self.recipe.seed
        corpora = [file.corpus for file in self.split.shards[index]]
        documents = self.recipe.mixture.choose(files, corpora, seed or 0, epoch, index)
        if seed is not None:
            order = permutation(len(documents), seed, epoch, index, Purpose.DOCUMENTS)
            documents = documents[order]
        blocks = self._cut(files, documents, epoch, index)
        if seed is not None:
            blocks.reorder(permutation(len(blocks), seed, epoch, index, Purpose.BLOCKS))
        self._num_samples[index] = len(blocks)
        if blocks.num_dropped:
            self._report_dropped(blocks, index)
        return blocks

    def _cut(
        self, files: Sequence[TokenFile], documents: Ints, epoch: int, index: int
    ) -> BlockDataset[Any]:
        """The sequences of a shard's documents, in the order of the documents."""
        end_id = self.cache.tokenizer.dictionary.eos
        return TokenBlockDataset(files, documents, self.recipe.packing, end_id=end_id)

    def _report_dropped(self, blocks: BlockDataset[Any], index: int) -> None:
        assert isinstance(blocks, TokenBlockDataset)
        logger.info(
            "%s, shard %d: --sample-break-mode %s drops %d of %d tokens; %d long documents "
            "lose %s",
            self.name, index, self.recipe.packing.break_mode, blocks.num_dropped,
            blocks.num_tokens, blocks.num_long, self.cache.kind.cut,
        )  # fmt: skip

    def _report_bad_records(self, records: Sequence[QuarantinedRecord]) -> None:
        if not records:
            return
        self.quarantine.add(records)
        first = records[0]
        self.reports.append(
            {
                "event": "bad_record",
                "subset": self.name,
                "file": first.file,
                "records": len(records),
                "line": first.line,
                "reason": first.reason,
                "listed_in": str(self.quarantine.path),
            }
        )

    def _log_summary(self, index: int) -> None:
        summary = self.summaries[index]
        logger.info(
            "%s, shard %d of %d: %s, %d tokens, %.1f MB of text",
            self.name, index, self.num_shards(), summary.lines.describe(), summary.tokens,
            summary.num_bytes / 1e6,
        )  # fmt: skip

    def _log_mixture(self, index: int, files: Sequence[TokenFile]) -> None:
        if self.recipe.mixture.is_plain:
            return
        sizes = corpus_sizes(files, [file.corpus for file in self.split.shards[index]])
        copies = self.recipe.mixture.copies(sizes)
        for name, size in sizes.items():
            logger.info(
                "%s, shard %d: %s has %d documents and %d tokens, read %.3f times an epoch",
                self.name, index, name, size.documents, size.tokens, copies[name],
            )  # fmt: skip
