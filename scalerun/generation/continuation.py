"""Continuation: a request that is being answered, by draws or by a search.

N sequences of the request, K tokens that may follow each of them.
"""

from __future__ import annotations

from torch import Tensor

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.dataclass.errors import UserError
from scalerun.generation.answer_text import AnswerText
from scalerun.generation.beam_search import BeamSearch, Hypothesis
from scalerun.generation.choice import Choice
from scalerun.generation.events import (
    LENGTH,
    STOP,
    Alternatives,
    Event,
    FailedEvent,
    FinishedEvent,
    Generation,
    Listener,
    PromptEvent,
    PromptScore,
    TokenEvent,
)
from scalerun.generation.request import Request


class Continuation:
    """A request that is being answered; see :class:`Draws` and :class:`Search`.

    Args:
        request: what is asked for.
        prompt: the tokens of it that are read, without the separator.
        tokenizer: the vocabulary of the answer.
        listener: called for each event.
    """

    def __init__(
        self, request: Request, prompt: list[int], tokenizer: BaseTokenizer, listener: Listener
    ) -> None:
        self.request = request
        self.params = request.params
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.eos = tokenizer.dictionary.eos
        self.score: PromptScore | None = None
        self.is_over = False
        self.num_new_tokens = 0
        """Tokens that all its answers have so far."""
        self.num_sequences = 1
        """N, sequences of the batch that are its own; one until the prompt was read."""
        self.steps: list[tuple[int, int]] = []
        """For each sequence to go on with: which of the N it continues, and by which token."""
        self._listener = listener

    @property
    def inputs(self) -> list[int]:
        """What the model reads first: the separator and the prompt."""
        whole = [self.eos, *self.prompt]
        # Nothing follows the last token of a prompt that is only scored.
        return whole[: max(len(self.prompt), 1)] if self.params.max_new_tokens == 0 else whole

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at most; the last new one is never read."""
        return max(len(self.prompt) + self.params.max_new_tokens, 1)

    def prompt_scored(self, score: PromptScore) -> None:
        """Take what the model thinks of the prompt."""
        self.score = score
        self.send(PromptEvent(self.prompt, score))

    def fail(self, error: UserError) -> None:
        """Give up."""
        self.send(FailedEvent(error))
        self.end()

    def end(self) -> None:
        """Take no more part."""
        self.is_over = True
        self.steps = []

    def send(self, event: Event) -> None:
        """Tell the listener, unless nobody wants to hear any more."""
        if not self.is_over:
            self._listener(event)


class Draws(Continuation):
    """Answers that are drawn, or greedily taken, each by itself."""

    def __init__(
        self, request: Request, prompt: list[int], tokenizer: BaseTokenizer, listener: Listener
    ) -> None:
        super().__init__(request, prompt, tokenizer, listener)
        self.choices = [
            Choice(number, prompt, self.params, tokenizer) for number in range(self.params.num_rows)
        ]
        self.going = self.choices

    def sources(self) -> list[int]:
        """For each choice that goes on, which of the N sequences is its own."""
        # All begin at the end of the one prompt.
        return list(range(len(self.going))) if self.steps else [0] * len(self.going)

    def accept(self, choice: Choice, token: int, logprob: float, top: Alternatives) -> None:
        """Give a choice its next token."""
        ends = token == self.eos
        piece = choice.accept(token, logprob, top, ends=ends)
        self.num_new_tokens += not ends
        if not ends and not self.params.is_ranked:
            shown = choice.top_logprobs[-1] if self.params.logprobs else []
            self.send(TokenEvent(choice.number, token, piece, logprob, shown))
        if choice.finish_reason and not self.params.is_ranked:
            self._send_finished(choice.number, choice)

    def settle(self) -> None:
        """All choices have their tokens: find out what to read next."""
        if self.is_over:
            return
        sources = self.sources()
        going = [i for i, choice in enumerate(self.going) if not choice.finish_reason]
        self.steps = [(sources[i], self.going[i].tokens[-1]) for i in going]
        self.going = [self.going[i] for i in going]
        if not self.going:
            self._finish()

    def finish_empty(self) -> None:
        """End with answers of no token, where only the prompt is to be scored."""
        for choice in self.choices:
            choice.finish_reason = LENGTH
            if not self.params.is_ranked:
                self._send_finished(choice.number, choice)
        self._finish()

    def _finish(self) -> None:
        if self.params.is_ranked:
            best = sorted(self.choices, key=lambda choice: -choice.score / max(choice.length, 1))
            for number, choice in enumerate(best[: self.params.n]):
                self._send_finished(number, choice)
        self.end()

    def _send_finished(self, number: int, choice: Choice) -> None:
        rest, generation = choice.finish(self.score)
        text = generation.text if self.params.is_ranked else rest
        self.send(FinishedEvent(number, text, generation))


class Search(Continuation):
    """Answers that a beam search finds."""

    def __init__(
        self, request: Request, prompt: list[int], tokenizer: BaseTokenizer, listener: Listener
    ) -> None:
        super().__init__(request, prompt, tokenizer, listener)
        self.search = BeamSearch(
            beam=self.params.beam,
            lenpen=self.params.lenpen,
            max_length=self.params.max_new_tokens,
            eos=self.eos,
            stops=lambda answer: bool(self.params.stop) and self._text(answer).stopped,
            groups=self.params.diverse_beam_groups,
            strength=self.params.diverse_beam_strength,
        )

    def advance(self, logprobs_NK: Tensor, tokens_NK: Tensor) -> None:
        """Choose the next tokens of all hypotheses.

        Args:
            logprobs_NK: the best of each, as :func:`best_tokens` gives them.
            tokens_NK: the tokens that they belong to.
        """
        parents = self.search.step(logprobs_NK, tokens_NK)
        tokens = [answer.tokens[-1] for answer in self.search.live]
        self.steps = list(zip(parents, tokens, strict=True))
        if not self.steps:
            for number, answer in enumerate(self.search.finished[: self.params.n]):
                generation = self._generation(answer)
                self.num_new_tokens += len(generation.tokens)
                self.send(FinishedEvent(number, generation.text, generation))
            self.end()

    def _generation(self, answer: Hypothesis) -> Generation:
        return Generation(
            tokens=list(answer.tokens),
            token_logprobs=list(answer.logprobs),
            text=self._text(answer).text,
            finish_reason=LENGTH if answer.is_cut else STOP,
            score=answer.score(self.params.lenpen),
            prompt=self.score,
        )

    def _text(self, answer: Hypothesis) -> AnswerText:
        text = AnswerText(self.tokenizer, self.prompt, self.params.stop)
        for count, token in enumerate(answer.tokens, start=1):
            text.push(token, may_stop=count >= self.params.min_new_tokens)
        text.finish()
        return text
