"""Choice: one answer that is being drawn."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.generation.answer_text import AnswerText
from scalerun.generation.events import LENGTH, STOP, Alternatives, Generation, PromptScore


class Choice:
    """One answer that is being drawn, and what came of it so far.

    Its draws come from a stream of numbers that the seed and the choice's number decide.

    Args:
        number: of the choice among those of its prompt, from 0.
        prompt: tokens, without the separator.
        params: how the prompt is continued.
        tokenizer: the vocabulary of the answer.
    """

    def __init__(
        self, number: int, prompt: Sequence[int], params: SamplingParams, tokenizer: BaseTokenizer
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.params = params
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[Alternatives] = []
        self.score = 0.0
        self.length = 0
        """Tokens chosen, the end of the document included."""
        self.finish_reason = ""
        self._text = AnswerText(tokenizer, prompt, params.stop)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._random = random.Random(f"{seed}/{number}")
        self._counts_V: Tensor | None = None
        self._in_prompt_V: Tensor | None = None

    def uniform(self) -> float:
        """The next number of the choice's own stream, in [0, 1)."""
        return self._random.random()

    @property
    def may_end(self) -> bool:
        """Whether there are tokens enough."""
        return len(self.tokens) >= self.params.min_new_tokens

    def accept(self, token: int, logprob: float, top: Alternatives, *, ends: bool) -> str:
        """Take the chosen token; return the text that is now certain.

        Args:
            top: what might have been chosen.
            ends: the token is the end of the document.
        """
        self.score += logprob
        self.length += 1
        if ends:
            self.finish_reason = STOP
            return ""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.params.logprobs:
            self.top_logprobs.append(top[: self.params.logprobs])
        if self._counts_V is not None:
            self._counts_V[token] += 1
        piece = self._text.push(token, may_stop=self.may_end)
        if self._text.stopped:
            self.finish_reason = STOP
        elif len(self.tokens) == self.params.max_new_tokens:
            self.finish_reason = LENGTH
        return piece

    def finish(self, score: PromptScore | None) -> tuple[str, Generation]:
        """The rest of the text, and the whole answer."""
        rest = self._text.finish()
        generation = Generation(
            tokens=self.tokens,
            token_logprobs=self.logprobs,
            text=self._text.text,
            finish_reason=self.finish_reason,
            score=self.score,
            top_logprobs=self.top_logprobs,
            prompt=score,
        )
        return rest, generation

    def said(self, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """How often the answer has each token, (V,), and which the prompt has, (V,) bool."""
        if self._counts_V is None or self._in_prompt_V is None:
            # Made at the first step: afterwards a token at a time is added.
            self._counts_V = torch.zeros(vocabulary, dtype=torch.float64, device=device)
            self._in_prompt_V = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._in_prompt_V[torch.tensor(self.prompt, dtype=torch.int64, device=device)] = True
        return self._counts_V, self._in_prompt_V
