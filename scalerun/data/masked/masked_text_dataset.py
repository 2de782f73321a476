"""MaskedTextDataset: sentences packed into sequences, with tokens hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scalerun.data.base_dataset import DatasetCounts
from scalerun.data.collate import Collate
from scalerun.data.masked.masking import MaskedBlock, Masking
from scalerun.data.masked.sentence_blocks import SentenceBlocks
from scalerun.data.permutation import Purpose
from scalerun.data.streaming_dataset import Recipe, StreamingTextDataset, logger
from scalerun.data.text.layout import Split
from scalerun.data.text.quarantine import QuarantineFile
from scalerun.data.text.sentence_dataset import line_of_sentence
from scalerun.data.text.token_cache import TokenCache
from scalerun.data.text.token_file import TokenFile
from scalerun.data.token_block_dataset import BlockDataset, Ints

VALID_SEED = 0
"""Of the masks of validation sets: they are the same in all runs."""


class MaskedTextDataset(StreamingTextDataset):
    """As its base, of masked sequences.

    The mask of a sequence is a function of (seed, epoch, shard, number of the sequence). That of a
    set without a seed never changes.

    Args:
        split: its files.
        cache: gives their tokens.
        recipe: cutting, order and shares.
        collater: makes batches.
        quarantine: where bad records are listed.
        masking: how tokens are hidden.
    """

    def __init__(
        self,
        split: Split,
        cache: TokenCache,
        *,
        recipe: Recipe,
        collater: Collate,
        quarantine: QuarantineFile,
        masking: Masking,
    ) -> None:
        self.masking = masking  # the base asks for the settings at once
        self._told: set[int] = set()
        super().__init__(split, cache, recipe=recipe, collater=collater, quarantine=quarantine)

    @property
    def ingredients(self) -> dict[str, str]:
        mine = super().ingredients
        for name in ("--corpus-weights", "--multicorpus-sampling-alpha", "--valid-fraction"):
            del mine[name]
        weights = self.recipe.mixture.weights.items()
        masking = self.masking
        return {
            **{("--spm-model" if k == "--tokenizer" else k): value for k, value in mine.items()},
            "the weights of the corpora": repr(sorted(weights)),
            "--mask-prob": str(masking.mask_prob),
            "--span-length": str(masking.span_length),
            "--leave-unmasked-prob": str(masking.leave_unmasked_prob),
            "--random-token-prob": str(masking.random_token_prob),
        }

    def counts(self) -> DatasetCounts:
        # What it costs to predict a part of the tokens says nothing about bytes.
        return replace(super().counts(), num_bytes=0)

    def _settings(self) -> list[str]:
        return [*super()._settings(), repr(self.masking)]

    def _cut(
        self, files: Sequence[TokenFile], documents: Ints, epoch: int, index: int
    ) -> BlockDataset[Any]:
        sentences = SentenceBlocks(
            files, documents, self.recipe.packing, dictionary=self.cache.tokenizer.dictionary
        )
        seed = self.recipe.seed
        key = (VALID_SEED, 1) if seed is None else (seed, epoch)
        return MaskedBlockDataset(sentences, self.masking, (*key, index, Purpose.MASK))

    def _report_dropped(self, blocks: BlockDataset[Any], index: int) -> None:
        assert isinstance(blocks, MaskedBlockDataset)
        if index in self._told:
            return
        self._told.add(index)
        lengths = blocks.sentences.long_lengths
        count, tokens = len(lengths), int(lengths.sum())
        shard = self.split.shards[index]
        files = [file.name for file in shard]
        assert blocks.sentences.first_long is not None
        place, number = blocks.sentences.first_long
        logger.warning(
            "%s:%d is the first of %d sentences (%d tokens) of %s, shard %d, that do not fit into "
            "--tokens-per-sample %d and are left out; raise it, or break their lines",
            shard[place].path, line_of_sentence(shard[place].path, number), count, tokens,
            self.name, index, self.recipe.packing.tokens_per_sample,
        )  # fmt: skip
        self.reports.append(
            {
                "event": "long_sentences",
                "subset": self.name,
                "files": files,
                "sentences": count,
                "tokens": tokens,
            }
        )


class MaskedBlockDataset(BlockDataset[MaskedBlock]):
    """Masks sequences when they are asked for.

    Args:
        sentences: the sequences.
        masking: how tokens are hidden.
        key: seeds the masks, with the number of each sequence.
    """

    def __init__(self, sentences: SentenceBlocks, masking: Masking, key: tuple[int, ...]) -> None:
        self.sentences = sentences
        self.masking = masking
        self.key = key

    @property
    def num_tokens(self) -> int:
        return self.sentences.num_tokens

    @property
    def num_dropped(self) -> int:
        return self.sentences.num_dropped

    def __len__(self) -> int:
        return len(self.sentences)

    def _block(self, number: int) -> MaskedBlock:
        return self.masking(self.sentences.tokens(number), *self.key, number)
