"""Mixture: how often each corpus of a shard is read in an epoch."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from scalerun.data.permutation import Purpose, permutation, uniform
from scalerun.data.text.token_file import TokenFile
from scalerun.data.token_block_dataset import Ints
from scalerun.dataclass.errors import ConfigError, UserError


@dataclass(frozen=True)
class CorpusSize:
    """What a corpus has in one shard."""

    documents: int
    tokens: int


@dataclass(frozen=True)
class Mixture:
    """Shares of the corpora. An epoch keeps its size: some corpora repeat, others are sampled.

    ``weights`` (``--corpus-weights``) are shares of the *tokens* of each shard, scaled to sum to 1
    over the corpora that the shard has; weight 0 leaves a corpus out. Without weights, ``alpha``
    (``--multicorpus-sampling-alpha``) gives corpus i the share (n_i / sum n)^alpha of *documents*,
    scaled likewise; 1 leaves the data as it is.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    alpha: float = 1.0

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(
                    f"--corpus-weights gives {name} the weight {weight:g}; give 0 or a positive "
                    "number"
                )
        if self.weights and not any(self.weights.values()):
            raise ConfigError("--corpus-weights leaves nothing to train on: all weights are 0")
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ConfigError(f"--multicorpus-sampling-alpha is {self.alpha:g}; give 0 or more")
        if self.weights and self.alpha != 1:
            raise ConfigError(
                "--corpus-weights and --multicorpus-sampling-alpha exclude each other"
            )

    @property
    def is_plain(self) -> bool:
        """Whether every document is read exactly once."""
        return not self.weights and self.alpha == 1

    def check_names(self, corpora: Sequence[str]) -> None:
        """Compare the names with the corpora of the training data.

        Raises:
            UserError: a weight names no corpus, or a corpus has no weight.
        """
        if not self.weights:
            return
        unknown = sorted(set(self.weights) - set(corpora))
        if unknown:
            raise UserError(
                f"--corpus-weights names {', '.join(unknown)}, which the training data does not "
                f"have; its corpora: {', '.join(corpora)}"
            )
        absent = sorted(set(corpora) - set(self.weights))
        if absent:
            raise UserError(
                f"--corpus-weights gives no weight to {', '.join(absent)}; give each corpus one "
                "(0 leaves it out)"
            )

    def copies(self, sizes: Mapping[str, CorpusSize]) -> dict[str, float]:
        """How often each corpus of a shard is read, such as 1.4 times."""
        if self.is_plain:
            return dict.fromkeys(sizes, 1.0)
        amounts = {name: self._amount(size) for name, size in sizes.items()}
        total = sum(amounts.values())
        if self.weights:
            shares = {name: self.weights[name] if amounts[name] else 0.0 for name in sizes}
        else:
            shares = {
                name: (amount / total) ** self.alpha if amount else 0.0
                for name, amount in amounts.items()
            }
        whole = sum(shares.values())
        return {
            name: shares[name] / whole * total / amounts[name] if shares[name] else 0.0
            for name in sizes
        }

    def choose(self, files: Sequence[TokenFile], corpora: Sequence[str], *key: int) -> Ints:
        """Numbers of the documents of a shard to read, before they are shuffled.

        A corpus that is read 1.4 times appears once whole, and then with documents drawn by
        ``key`` that make up 0.4 of it on average.

        Args:
            files: token files of the shard.
            corpora: the corpus of each file.
            key: integers that seed the draw.
        """
        first = np.cumsum([0] + [file.num_documents for file in files])
        if self.is_plain:
            return np.arange(int(first[-1]))
        chosen: list[Ints] = []
        for name, copies in self.copies(corpus_sizes(files, corpora)).items():
            mine = [i for i, corpus in enumerate(corpora) if corpus == name]
            documents = np.concatenate([np.arange(first[i], first[i + 1]) for i in mine])
            lengths = np.concatenate([np.diff(files[i].ends) for i in mine])
            costs = lengths if self.weights else np.ones_like(lengths)
            chosen += [documents] * int(copies)
            seed = (*key, Purpose.REMAINDER, zlib.crc32(name.encode()))
            order = permutation(len(documents), *seed)
            offset = uniform(*seed)  # else a small share of few documents would be no document
            before = np.cumsum(costs[order]) - costs[order]
            wanted = (copies - int(copies)) * int(costs.sum())
            chosen.append(documents[order[before + offset * costs[order] < wanted]])
        return np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)

    def _amount(self, size: CorpusSize) -> int:
        return size.tokens if self.weights else size.documents


def corpus_sizes(files: Sequence[TokenFile], corpora: Sequence[str]) -> dict[str, CorpusSize]:
    """What each corpus has, by name in alphabetical order."""
    sizes: dict[str, CorpusSize] = {}
    for name in sorted(set(corpora)):
        mine = [file for file, corpus in zip(files, corpora, strict=True) if corpus == name]
        sizes[name] = CorpusSize(
            sum(file.num_documents for file in mine), sum(file.num_tokens for file in mine)
        )
    return sizes
