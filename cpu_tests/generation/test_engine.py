from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from typing import Any

import pytest

from cpu_tests.generation.slow_reference import SlowReference
from cpu_tests.generation.tiny_models import (
    ARCHITECTURES,
    EOS,
    A,
    Letters,
    tiny_model,
)
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.generation.engine import Engine, Ticket
from scalerun.generation.events import (
    Event,
    FailedEvent,
    FinishedEvent,
    Generation,
    PromptEvent,
    TokenEvent,
)
from scalerun.generation.request import Request
from scalerun.generation.sequence_generator import SequenceGenerator

LETTERS = Letters()


class Client:
    """Hears of one request."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.events: list[Event] = []
        self.ticket: Ticket = engine.submit(request, self.events.append)
        self.request = request

    def finished(self) -> list[Generation]:
        ends = [event for event in self.events if isinstance(event, FinishedEvent)]
        return [end.generation for end in sorted(ends, key=lambda end: end.choice)]

    def streamed(self, choice: int) -> tuple[list[int], str]:
        """Tokens and text, put together from the events of a choice."""
        mine = [
            event
            for event in self.events
            if isinstance(event, TokenEvent | FinishedEvent) and event.choice == choice
        ]
        tokens = [event.token for event in mine if isinstance(event, TokenEvent)]
        return tokens, "".join(event.text for event in mine)


def engine_of(name: str = "rotary", **settings: Any) -> Engine:
    return Engine(tiny_model(name), LETTERS, **settings)


def letters(draw: random.Random, least: int, most: int) -> list[int]:
    return [A + draw.randrange(12) for _ in range(draw.randint(least, most))]


def random_params(draw: random.Random) -> SamplingParams:
    """Any parameters that do not contradict each other."""
    most = draw.randint(1, 10)
    settings: dict[str, Any] = {
        "max_new_tokens": most,
        "min_new_tokens": draw.choice([0, 0, draw.randint(0, most)]),
        "seed": draw.randrange(2**63),
        "echo": draw.random() < 0.2,
    }
    if draw.random() < 0.6:
        stops = [LETTERS.decode(letters(draw, 1, 3)) for _ in range(draw.randint(1, 3))]
        settings["stop"] = tuple(stops)
    if draw.random() < 0.15:
        beam = draw.randint(2, 4)
        lenpen = draw.choice([0.0, 0.6, 1.0, 1.5])
        return SamplingParams(**settings, beam=beam, lenpen=lenpen, n=draw.randint(1, beam))
    maybe: dict[str, Any] = {
        "temperature": draw.choice([0.0, 0.5, 1.0, 2.0]),
        "top_k": draw.randint(1, 9),
        "top_p": draw.uniform(0.2, 1.0),
        "min_p": draw.uniform(0.0, 0.5),
        "repetition_penalty": draw.uniform(0.7, 2.0),
        "presence_penalty": draw.uniform(-1.0, 2.0),
        "frequency_penalty": draw.uniform(-1.0, 2.0),
        "logprobs": draw.randint(0, 5),
        "n": draw.randint(1, 3),
    }
    settings |= {name: value for name, value in maybe.items() if draw.random() < 0.4}
    if draw.random() < 0.2:
        settings["best_of"] = settings.get("n", 1) + draw.randint(0, 2)
    if settings["echo"] and draw.random() < 0.3:
        settings |= {"max_new_tokens": 0, "min_new_tokens": 0}
    return SamplingParams(**settings)


def random_requests(name: str, count: int, seed: int = 0) -> list[Request]:
    draw = random.Random(f"{name} {seed}")
    has_source = "translator" in name
    return [
        Request(
            letters(draw, 0, draw.choice([2, CONTEXT - 10])),
            random_params(draw),
            [*letters(draw, 0, 9), EOS] if has_source else None,
        )
        for _ in range(count)
    ]


def check_answers(reference: SlowReference, request: Request, found: list[Generation]) -> None:
    """All that an answer says is what the reference finds."""
    expected = reference.answers(request)
    assert len(found) == len(expected) == request.params.n
    for answer, truth in zip(found, expected, strict=True):
        assert answer.tokens == truth.tokens
        assert answer.text == truth.text
        assert answer.finish_reason == truth.reason
        assert answer.token_logprobs == pytest.approx(truth.logprobs, abs=1e-4)
        length = truth.length**request.params.lenpen if request.params.beam > 1 else 1.0
        assert answer.score == pytest.approx(truth.total / length, abs=1e-3)
        if request.params.logprobs:
            for top, best in zip(answer.top_logprobs, truth.tops, strict=True):
                assert [logprob for _, logprob in top] == pytest.approx(best, abs=1e-4)
        else:
            assert answer.top_logprobs == []
        assert (answer.prompt is not None) == request.params.echo
        if answer.prompt is not None:
            scores = reference.prompt_logprobs(request)
            assert answer.prompt.logprobs == pytest.approx(scores, abs=1e-4)


def check_events(client: Client) -> None:
    """The stream says what the answers say, in their order, and ends with each answer."""
    params = client.request.params
    found = client.finished()
    assert len(found) == params.n
    if params.echo:
        assert isinstance(client.events[0], PromptEvent)
        assert client.events[0].tokens == client.request.prompt
    for choice, answer in enumerate(found):
        tokens, text = client.streamed(choice)
        assert text == answer.text
        assert tokens == ([] if params.is_ranked else answer.tokens)
        last = [e for e in client.events if getattr(e, "choice", None) == choice][-1]
        assert isinstance(last, FinishedEvent)
    counted = sum(len(answer.tokens) for answer in found)
    assert client.ticket.num_prompt_tokens == len(client.request.prompt)
    assert client.ticket.num_new_tokens >= counted
    if params.num_rows == params.n or params.beam > 1:
        assert client.ticket.num_new_tokens == counted


def run_at_random(engine: Engine, requests: Iterable[Request], seed: int) -> list[Client]:
    """Hand requests in at any time, and break some off; those that were not."""
    draw = random.Random(seed)
    waiting, clients, broken = list(requests), [], []
    while waiting or engine.step():
        for _ in range(draw.choice([0, 0, 1, 2, 5])):
            if not waiting:
                break
            request = waiting.pop()
            clients.append(Client(engine, request))
            if draw.random() < 0.3:
                broken.append(Client(engine, dataclasses.replace(request)))
        if broken and draw.random() < 0.5:
            client = broken.pop(draw.randrange(len(broken)))
            engine.cancel(client.ticket)
            client.events.append(FailedEvent(UserError("nothing may follow")))
            clients.append(client)
        engine.step()
    for client in clients:
        if isinstance(client.events[-1], FailedEvent):
            assert str(client.events[-1].error) == "nothing may follow"
    return [client for client in clients if not isinstance(client.events[-1], FailedEvent)]


def check_architecture(name: str, count: int, seed: int) -> None:
    model = tiny_model(name)
    reference, requests = SlowReference(model, LETTERS), random_requests(name, count, seed)
    engine = Engine(model, LETTERS, max_num_seqs=9)
    clients = run_at_random(engine, requests, seed)
    assert {id(client.request) for client in clients} >= {id(request) for request in requests}
    for client in clients:
        check_answers(reference, client.request, client.finished())
        check_events(client)
    sources = None if requests[0].source is None else [request.source or [] for request in requests]
    together = SequenceGenerator(model, LETTERS).generate(
        [request.prompt for request in requests],
        [request.params for request in requests],
        sources=sources,
    )
    streamed = {id(client.request): client.finished()[0] for client in clients}
    for request, answer in zip(requests, together, strict=True):
        assert answer.tokens == streamed[id(request)].tokens
        assert answer.text == streamed[id(request)].text


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_requests_are_answered_as_one_by_one_without_a_cache(name: str) -> None:
    check_architecture(name, 5, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_thousand_random_requests_are_answered_as_one_by_one(name: str) -> None:
    check_architecture(name, 77, seed=2)
