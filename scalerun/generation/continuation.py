"""Continuation: a prompt that is being continued, by draws or by a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.generation.answer_text import AnswerText
from scalerun.generation.beam_search import BeamSearch, Hypothesis

STOP = "stop"
LENGTH = "length"


@dataclass(frozen=True)
class Generation:
    """A continuation."""

    tokens: list[int]
    """New tokens, those of a stop string included, the end of the document not."""
    token_logprobs: list[float]
    """Natural log-probability of each token under the model's own distribution: at temperature 1,
    with no token ruled out."""
    text: str
    """The new text, without the stop string."""
    finish_reason: str
    """``stop``: the document ended or a stop string came; ``length``: ``max_new_tokens``."""
    score: float
    """Log-probability of the continuation, with the end of the document if it was chosen; in a
    beam search divided by length ** lenpen."""


class Continuation:
    """A prompt that is being continued: its draws and what came of them, or its beam search.

    Args:
        index: of the prompt among those of a call.
        prompt: its tokens, behind the separator.
        params: how it is continued.
        tokenizer: the vocabulary of the answer.
        source: what an encoder reads; None without one.
        on_text: called with ``index`` and each piece of text that is certain.
    """

    def __init__(
        self,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        tokenizer: BaseTokenizer,
        source: Sequence[int] | None,
        on_text: Callable[[int, str], None] | None,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.source = source
        self.params = params
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.score = 0.0
        self.finish_reason = ""
        self.tokenizer = tokenizer
        self.stream = AnswerText(tokenizer, prompt[1:], params.stop)
        self._on_text = on_text
        # On the CPU whatever the model runs on: every device draws the same numbers.
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def uniform(self) -> float:
        """The next number of the prompt's own generator."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def accept(self, token: int, logprob: float, *, ends: bool) -> None:
        """Take the chosen token; ``ends``: it is the end of the document."""
        self.score += logprob
        if ends:
            self._finish(STOP)
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        count = len(self.tokens)
        self._show(self.stream.push(token, may_stop=count >= self.params.min_new_tokens))
        if self.stream.stopped:
            self._finish(STOP)
        elif count == self.params.max_new_tokens:
            self._finish(LENGTH)

    def result(self) -> Generation:
        """What was drawn."""
        return Generation(
            self.tokens, self.logprobs, self.stream.text, self.finish_reason, self.score
        )

    def search(self, eos: int) -> BeamSearch:
        """A beam search for the row's answers, about to begin."""
        params = self.params
        return BeamSearch(
            beam=params.beam,
            lenpen=params.lenpen,
            max_length=params.max_new_tokens,
            eos=eos,
            stops=lambda answer: bool(params.stop) and self._text(answer).stopped,
            groups=params.diverse_beam_groups,
            strength=params.diverse_beam_strength,
        )

    def found(self, answer: Hypothesis) -> Generation:
        """An answer of the search."""
        return Generation(
            tokens=list(answer.tokens),
            token_logprobs=list(answer.logprobs),
            text=self._text(answer).text,
            finish_reason=LENGTH if answer.is_cut else STOP,
            score=answer.score(self.params.lenpen),
        )

    def _text(self, answer: Hypothesis) -> AnswerText:
        text = AnswerText(self.tokenizer, self.prompt[1:], self.params.stop)
        for count, token in enumerate(answer.tokens, start=1):
            text.push(token, may_stop=count >= self.params.min_new_tokens)
        text.finish()
        return text

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self._show(self.stream.finish())

    def _show(self, text: str) -> None:
        if text and self._on_text is not None:
            self._on_text(self.index, text)
