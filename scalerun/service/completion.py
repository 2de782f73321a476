"""From a request's body to the engine's requests, and from the engine's events to the answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer, StreamDecoder
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.generation.engine import Engine
from scalerun.generation.events import (
    Alternatives,
    Event,
    FailedEvent,
    FinishedEvent,
    PromptEvent,
    TokenEvent,
)
from scalerun.generation.request import Request
from scalerun.service.errors import SERVER, ApiError, of_user_error
from scalerun.service.responses import event_text
from scalerun.service.scheduler import Call
from scalerun.service.schema import Choice, Completion, CompletionRequest, Logprobs, Usage

CONTEXT_TOKENS = 16
"""Enough of a prompt for a decoder to know where a character or a word goes on."""


def request_for(prompt: str | list[int], asked: CompletionRequest, engine: Engine) -> Request:
    """What the engine is to do for one prompt.

    Raises:
        ApiError: 400, it cannot; names the field.
    """
    tokens = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    try:
        request = Request(tokens, _params(asked))
        engine.check(request)
    except UserError as error:
        raise of_user_error(error) from error
    return request


def _params(asked: CompletionRequest) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=asked.max_tokens,
        min_new_tokens=asked.min_tokens,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        n=asked.n,
        best_of=asked.best_of,
        logprobs=asked.logprobs,
        echo=asked.echo,
        stop=tuple(asked.stop),
        seed=asked.seed,
        truncate_prompt=asked.truncate_prompt,
    )


class Answer:
    """The choices of all prompts of a body, as they grow.

    Choices are numbered through: those of the first prompt come first.

    Args:
        asked: the body.
        call: its prompts in the engine, in the same order.
        model: its name for clients.
        tokenizer: of the engine.
    """

    def __init__(
        self, asked: CompletionRequest, call: Call, model: str, tokenizer: BaseTokenizer
    ) -> None:
        self.asked = asked
        self.call = call
        self.model = model
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._tokenizer = tokenizer
        self._choices = [
            [
                _GrowingChoice(i * asked.n + number, tokenizer, request, asked)
                for number in range(asked.n)
            ]
            for i, request in enumerate(call.requests)
        ]
        self._ended = False

    async def whole(self) -> bytes:
        """The answer in one piece, as JSON.

        Raises:
            ApiError: the engine failed.
        """
        while events := await self.call.take():
            for index, event in events:
                self._take(index, event)
        choices = [choice.whole() for each in self._choices for choice in each]
        return self._completion(choices, self._usage()).model_dump_json().encode()

    async def next_events(self) -> str:
        """The next events of a stream, with what came of the answer meanwhile; empty at the end.

        Raises:
            ApiError: the engine failed.
        """
        while events := await self.call.take():
            pieces = [piece for index, event in events for piece in self._take(index, event)]
            if pieces:
                return "".join(self._event([piece]) for piece in pieces)
        if self._ended:
            return ""
        self._ended = True
        options = self.asked.stream_options
        usage = "" if not (options and options.include_usage) else self._event([], self._usage())
        return usage + event_text("[DONE]")

    def _take(self, index: int, event: Event) -> list[Choice]:
        """Take an event of a prompt; return what a stream shows of it."""
        choices = self._choices[index]
        match event:
            case FailedEvent(error) if error.param is None:
                raise ApiError(500, str(error), type=SERVER)
            case FailedEvent(error):
                raise of_user_error(error)
            case PromptEvent():
                text = self._echoed(index, event)
                return [choice.begin(text, event) for choice in choices]
            case TokenEvent():
                return choices[event.choice].add(event)
            case FinishedEvent():
                return [choices[event.choice].finish(event)]

    def _echoed(self, index: int, event: PromptEvent) -> str:
        given = self.asked.prompts[index]
        whole = len(event.tokens) == len(self.call.requests[index].prompt)
        # Some tokenizers do not give back the spaces that they were given.
        return given if whole and isinstance(given, str) else self._tokenizer.decode(event.tokens)

    def _usage(self) -> Usage:
        prompt = sum(ticket.num_prompt_tokens for ticket in self.call.tickets)
        completion = sum(ticket.num_new_tokens for ticket in self.call.tickets)
        return Usage(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion
        )

    def _completion(self, choices: list[Choice], usage: Usage | None) -> Completion:
        return Completion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def _event(self, choices: list[Choice], usage: Usage | None = None) -> str:
        return event_text(self._completion(choices, usage).model_dump_json())


class _GrowingChoice:
    """One choice: its text and tokens so far."""

    def __init__(
        self, index: int, tokenizer: BaseTokenizer, request: Request, asked: CompletionRequest
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._tells = asked.logprobs is not None
        self._num_alternatives = asked.logprobs or 0
        self._pieces: list[str] = []
        self._logprobs = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        self._decoder = StreamDecoder(tokenizer)
        if not asked.echo:
            # The text of a token depends on what stands before it.
            for token in request.prompt[-CONTEXT_TOKENS:]:
                self._decoder.push(token)
        self._offset = 0

    def begin(self, text: str, event: PromptEvent) -> Choice:
        """Take the prompt that is to be repeated; return what a stream shows of it."""
        alternatives = event.score.top_logprobs or [[]] * len(event.tokens)
        told = self._told(list(zip(event.tokens, event.score.logprobs, alternatives, strict=True)))
        self._offset = len(text)
        self._pieces.append(text)
        return Choice(index=self.index, text=text, logprobs=told)

    def add(self, event: TokenEvent) -> list[Choice]:
        """Take a token; return what a stream shows of it, if anything."""
        self.num_tokens += 1
        self._pieces.append(event.text)
        told = self._told([(event.token, event.logprob, event.top_logprobs)])
        if not event.text and told is None:
            return []
        return [Choice(index=self.index, text=event.text, logprobs=told)]

    def finish(self, event: FinishedEvent) -> Choice:
        """Take the end; return the last piece of a stream."""
        generation, told = event.generation, None
        if not self.num_tokens and generation.tokens:
            # The answers were ranked: nothing of them came before.
            self.num_tokens = len(generation.tokens)
            alternatives = generation.top_logprobs or [[]] * self.num_tokens
            told = self._told(
                list(zip(generation.tokens, generation.token_logprobs, alternatives, strict=True))
            )
        self._pieces.append(event.text)
        self.finish_reason = generation.finish_reason
        return Choice(
            index=self.index, text=event.text, logprobs=told, finish_reason=self.finish_reason
        )

    def whole(self) -> Choice:
        """All of it."""
        text = "".join(self._pieces)
        told = None
        if self._tells:
            # Tokens of a stop text belong to the choice; their text does not.
            offsets = [min(offset, len(text)) for offset in self._logprobs.text_offset]
            told = self._logprobs.model_copy(update={"text_offset": offsets})
        return Choice(index=self.index, text=text, logprobs=told, finish_reason=self.finish_reason)

    def _told(self, tokens: Sequence[tuple[int, float, Alternatives]]) -> Logprobs | None:
        """What a client asked to know of some tokens, which are also kept for the whole."""
        if not self._tells:
            return None
        told = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token, logprob, alternatives in tokens:
            name = self._tokenizer.token_text(token)
            told.tokens.append(name)
            told.token_logprobs.append(logprob)
            told.top_logprobs.append(self._named(token, name, logprob, alternatives))
            told.text_offset.append(self._offset)
            self._offset += len(self._decoder.push(token))
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            getattr(self._logprobs, field).extend(getattr(told, field))
        return told

    def _named(
        self, token: int, name: str, logprob: float, alternatives: Alternatives
    ) -> dict[str, float]:
        """The chosen token and the likeliest ones, by their texts."""
        top = {name: logprob}
        for other, value in alternatives[: self._num_alternatives]:
            if other != token:
                text = self._tokenizer.token_text(other)
                # Two tokens may read alike; neither may hide the other.
                top[f"token_id:{other}" if text in top else text] = value
        return top
