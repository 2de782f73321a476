"""SequenceGenerator: greedy, sampled and beam-searched continuations of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.distributed.ranks import Control
from scalerun.generation.context_room import ContextRoom
from scalerun.generation.engine import Engine
from scalerun.generation.events import Event, FailedEvent, FinishedEvent, Generation, TokenEvent
from scalerun.generation.request import Request
from scalerun.models.base_decoder import BaseDecoder
from scalerun.models.encoder_decoder import EncoderDecoder


class SequenceGenerator:
    """Continues prompts that are all there already; see :class:`Engine`, which does the work.

    All prompts of a call are worked on together, with all their answers and hypotheses: memory
    limits how many to hand over.

    Args:
        model: a decoder, or an encoder with a decoder; set to evaluation for the time of a call.
        tokenizer: the vocabulary of what is generated.
        control: of the ranks that share the model's weights or experts; all of them must make the
            same calls, each with prompts of its own.
    """

    def __init__(
        self,
        model: BaseDecoder | EncoderDecoder,
        tokenizer: BaseTokenizer,
        *,
        control: Control | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.control = control
        self.eos = tokenizer.dictionary.eos
        self.context = ContextRoom(model, len(tokenizer.dictionary))

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.model.parameters()).device

    def room(self, prompt_length: int) -> int | None:
        """New tokens for which the context has room after a prompt; None where it has no end."""
        return self.context.room(prompt_length)

    def fit(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """The separator and as much of the prompt as is to be read.

        Raises:
            UserError: the prompt does not fit into the context with its new tokens.
        """
        return [self.eos, *self.context.fit(prompt, params)]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        sources: Sequence[Sequence[int]] | None = None,
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[Generation]:
        """Continue each prompt by its own parameters; of several answers, give the first.

        Args:
            prompts: tokens without special symbols; may be empty.
            params: one for each prompt.
            sources: for each prompt the tokens that an encoder-decoder reads, as in training.
            on_text: called with a prompt's index and its next piece of text as soon as the piece is
                certain; the pieces of a prompt join to its text.

        Raises:
            UserError: a prompt does not fit into the context with its new tokens, or a source is
                too long for the encoder, or the model's output is not finite.
        """
        return [answers[0] for answers in self._answers(prompts, params, sources, on_text)]

    def hypotheses(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        sources: Sequence[Sequence[int]] | None = None,
    ) -> list[list[Generation]]:
        """All ``n`` answers to each prompt, or all ``beam`` of its search, the best first.

        Errors are those of :meth:`generate`.
        """
        whole = [replace(each, n=each.beam) if each.beam > 1 else each for each in params]
        return self._answers(prompts, whole, sources, None)

    def _answers(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        sources: Sequence[Sequence[int]] | None,
        on_text: Callable[[int, str], None] | None,
    ) -> list[list[Generation]]:
        own = [None] * len(prompts) if sources is None else sources
        requests = [Request(*each) for each in zip(prompts, params, own, strict=True)]
        answers = [_Answers(index, on_text) for index in range(len(requests))]
        was_training = self.model.training
        engine = Engine(self.model, self.tokenizer, max_num_seqs=None, control=self.control)
        try:
            for request, mine in zip(requests, answers, strict=True):
                engine.submit(request, mine.hear)
            while engine.step():
                pass
        finally:
            # Where this fails, other ranks may still need its part in their calls.
            engine.cancel_all()
            while self.control is not None and engine.step():
                pass
            self.model.train(was_training)
        return [mine.found() for mine in answers]


class _Answers:
    """Collects the answers to one prompt, and passes the text of the first on."""

    def __init__(self, index: int, on_text: Callable[[int, str], None] | None) -> None:
        self.index = index
        self.on_text = on_text
        self.finished: dict[int, Generation] = {}
        self.error: UserError | None = None

    def hear(self, event: Event) -> None:
        if isinstance(event, FailedEvent):
            self.error = event.error
        elif isinstance(event, FinishedEvent):
            self.finished[event.choice] = event.generation
        if self.on_text is None or not isinstance(event, TokenEvent | FinishedEvent):
            return
        if event.choice == 0 and event.text:
            self.on_text(self.index, event.text)

    def found(self) -> list[Generation]:
        if self.error is not None:
            raise self.error
        return [self.finished[choice] for choice in sorted(self.finished)]
