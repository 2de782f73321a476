"""Scores of words, written beside the validation: ``--output-word-probs`` and ``-stats``."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Self

from torch import nn

from scalerun.cli.inference import LoadedRun
from scalerun.criterions.base_criterion import BaseCriterion, CriterionOutput
from scalerun.data.batch import IGNORE_INDEX, Batch
from scalerun.data.tokenizers.words import Word, WordReader, WordTable
from scalerun.dataclass.errors import UserError
from scalerun.generation.scoring import target_logprobs
from scalerun.models.base_decoder import BaseDecoder

PROBS_FLAG = "--output-word-probs"
STATS_FLAG = "--output-word-stats"


class WordRecorder(BaseCriterion):
    """A cross entropy that also adds up the scores of each word.

    Sequences have to come in the order of the text.

    Args:
        run: whose tokens they are.
        subset: the validation set, for the lines of the files.
        files: where they go.

    Raises:
        UserError: the model predicts no text.
    """

    def __init__(self, run: LoadedRun, subset: str, files: WordFiles) -> None:
        super().__init__(run.cfg.criterion)
        if run.task.tokenizer is None or not isinstance(run.model, BaseDecoder):
            raise UserError(
                f"{PROBS_FLAG} and {STATS_FLAG} need a model that predicts the next token of a "
                f"text, and --task {run.task.cfg._name} trains another; leave them out"
            )
        self.reader = WordReader(run.task.tokenizer)
        self.table = WordTable()
        self.subset = subset
        self.files = files

    def forward(self, model: nn.Module, batch: Batch) -> CriterionOutput:
        """Score one batch."""
        output = model(**batch.net_input())
        logprobs_BT = target_logprobs(output.whole_logits(), batch.targets)
        wanted_BT = batch.targets != IGNORE_INDEX
        targets, logprobs = batch.targets[wanted_BT].tolist(), logprobs_BT[wanted_BT].tolist()
        for target, logprob in zip(targets, logprobs, strict=True):
            for word in self.reader.push(target, logprob):
                self._take(word)
        return self.with_reports(
            CriterionOutput(-logprobs_BT.double().sum(), batch.num_targets), output.reports
        )

    def finish(self) -> int:
        """Write what is left; return the number of words."""
        for word in self.reader.finish():
            self._take(word)
        self.table.finish()
        self.files.write_stats(self.subset, self.table)
        return self.reader.num_words

    def _take(self, word: Word) -> None:
        self.table.add(word)
        self.files.write_prob(self.subset, word)


class WordFiles:
    """The files that were asked for, as a context; that they can be written is known by then.

    Args:
        probs: one line for each word of the text, or None.
        stats: one line for each different word, or None.
    """

    def __init__(self, probs: str | None, stats: str | None) -> None:
        self.paths = {PROBS_FLAG: probs, STATS_FLAG: stats}
        self._files: dict[str, IO[str]] = {}
        self._stack = ExitStack()

    @property
    def are_wanted(self) -> bool:
        """Whether there is any."""
        return any(path is not None for path in self.paths.values())

    def __enter__(self) -> Self:
        for flag, path in self.paths.items():
            if path is not None:
                file = Path(path).open("w", encoding="utf-8")
                self._files[flag] = self._stack.enter_context(file)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def write_prob(self, subset: str, word: Word) -> None:
        """Write one word of a text."""
        self._write(
            PROBS_FLAG,
            subset=subset,
            document=word.document,
            word=word.text,
            logprob=word.logprob,
            tokens=word.num_tokens,
        )

    def write_stats(self, subset: str, table: WordTable) -> None:
        """Write the words of a set."""
        for text, stats in table.by_count():
            self._write(
                STATS_FLAG,
                subset=subset,
                word=text,
                count=stats.count,
                logprob=stats.mean_logprob,
                next_logprob=stats.mean_next_logprob,
                without_next=stats.without_next,
            )

    def _write(self, flag: str, **record: Any) -> None:
        if flag in self._files:
            self._files[flag].write(json.dumps(record, ensure_ascii=False) + "\n")
