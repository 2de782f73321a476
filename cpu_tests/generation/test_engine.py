from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from cpu_tests.generation.slow_reference import SlowReference
from cpu_tests.generation.tiny_models import (
    ARCHITECTURES,
    CONTEXT,
    EOS,
    UNK,
    A,
    Letters,
    tiny_model,
)
from scalerun.dataclass.errors import UserError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.distributed.ranks import Control
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


def prompt_of(draw: random.Random, most: int) -> list[int]:
    """Letters, and now and then a symbol that no text has."""
    prompt = letters(draw, 0, most)
    return [draw.choice((EOS, UNK)) if draw.random() < 0.05 else token for token in prompt]


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
            prompt_of(draw, draw.choice([2, CONTEXT - 10])),
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


@pytest.mark.parametrize("name", ["xpos", "longnet", "retnet", "translator"])
def test_a_model_in_half_precision_streams_what_it_answers(name: str) -> None:
    engine = Engine(tiny_model(name).bfloat16(), LETTERS, max_num_seqs=9)
    for client in run_at_random(engine, random_requests(name, 5), seed=1):
        check_events(client)


@pytest.mark.long
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_thousand_random_requests_are_answered_as_one_by_one(name: str) -> None:
    check_architecture(name, 77, seed=2)


def greedy(count: int, **settings: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, min_new_tokens=count, temperature=0.0, **settings)


def calls_of(engine: Engine) -> list[tuple[int, int]]:
    """Rows and tokens of each call of the model, as they come."""
    seen: list[tuple[int, int]] = []
    block = engine.model.layers[0]  # type: ignore[union-attr, index]
    block.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[:2]))  # type: ignore[operator]
    return seen


def test_newcomers_join_in_their_order_as_soon_as_there_is_room() -> None:
    engine = engine_of(max_num_seqs=3)
    calls = calls_of(engine)
    lengths = [(2, 4), (1, 2), (3, 3), (1, 3)]
    clients = [Client(engine, Request([A] * n, greedy(new))) for n, new in lengths]
    wide = Client(engine, Request([A], greedy(2, n=3)))
    late = Client(engine, Request([A], greedy(1)))
    while engine.step():
        pass
    assert calls == [
        (3, 4),  # three prompts; the longest has three tokens behind the separator
        (3, 1),  # the second is done
        (2, 1),
        (1, 2),  # so that the fourth may join: the third is done
        (2, 1),
        (1, 1),
        (1, 2),  # three answers wait until there is room for all, the last behind them
        (3, 1),
        (1, 2),
    ]
    assert [len(each.finished()[0].tokens) for each in clients] == [new for _, new in lengths]
    assert len(wide.finished()) == 3
    assert len(late.finished()) == 1


def test_room_for_tokens_is_kept_for_the_longest_answer() -> None:
    engine = engine_of(max_num_tokens=20)
    calls = calls_of(engine)
    clients = [Client(engine, Request([A] * 3, greedy(5))) for _ in range(3)]
    while engine.step():
        pass
    assert [call for call in calls if call[1] > 1] == [(2, 4), (1, 4)]
    assert max(rows for rows, _ in calls) == 2
    assert all(len(client.finished()) == 1 for client in clients)


def test_an_idle_engine_says_so_and_begins_again() -> None:
    engine = engine_of()
    assert not engine.step()
    first = Client(engine, Request([A], greedy(3)))
    assert [engine.step() for _ in range(4)] == [True, True, True, False]
    second = Client(engine, Request([A], greedy(3)))
    while engine.step():
        pass
    assert first.finished() == second.finished()


def test_who_breaks_off_hears_no_more_and_nobody_else_notices() -> None:
    engine = engine_of()
    alone = Client(engine, Request([A + 3], greedy(6)))
    while engine.step():
        pass
    stays = Client(engine, Request([A + 3], greedy(6)))
    waits, goes = (Client(engine, Request([A], greedy(9))) for _ in range(2))
    leaves: list[Event] = []

    def leave(event: Event) -> None:
        leaves.append(event)
        engine.cancel(ticket)

    ticket = engine.submit(Request([A] * 9, SamplingParams(n=3, seed=1, max_new_tokens=9)), leave)
    engine.cancel(waits.ticket)
    engine.step()
    engine.step()
    engine.cancel(goes.ticket)
    while engine.step():
        pass
    assert stays.finished()[0].tokens == alone.finished()[0].tokens
    assert waits.events == []
    assert len(goes.events) == 2
    assert len(leaves) == 1
    engine.cancel(stays.ticket)
    assert not engine.step()


def test_a_request_that_cannot_be_computed_fails_by_itself() -> None:
    model = tiny_model("learned")
    with torch.no_grad():
        model.embedding.tokens.weight[UNK] = torch.nan  # type: ignore[union-attr, index]
    reference, engine = SlowReference(model, LETTERS), Engine(model, LETTERS)
    requests = [Request(prompt, greedy(5, logprobs=2)) for prompt in ([A], [A + 1] * 4)]
    before, after = (Client(engine, request) for request in requests)
    for sampling in (
        greedy(5, n=2),
        SamplingParams(beam=3, max_new_tokens=4),
        greedy(0, echo=True),
    ):
        broken = Client(engine, Request([A, UNK, A], sampling))
        engine.step()
        failure = broken.events[-1]
        assert isinstance(failure, FailedEvent)
        assert "the model's output is not finite" in str(failure.error)
    while engine.step():
        pass
    for client in (before, after):
        check_answers(reference, client.request, client.finished())


@pytest.mark.parametrize(
    ("name", "request_", "param", "message"),
    [
        ("rotary", Request([A] * 30, greedy(11)), "max_new_tokens", "give at most 10"),
        ("rotary", Request([A] * 41, greedy(1)), "prompt", "shorten the prompt"),
        ("rotary", Request([A, 16], greedy(1)), "prompt", "the token 16, and the vocabulary ends"),
        ("rotary", Request([-1], greedy(1)), "prompt", "the prompt has the token -1"),
        ("rotary", Request([A], greedy(1), [A]), "source", "nothing else has a use for any"),
        ("rotary", Request([A], greedy(1, n=9)), "n", "--n 9 needs more sequences than the 8"),
        ("rotary", Request([A], greedy(1, best_of=9)), "best_of", "--best-of 9 needs more"),
        (
            "rotary",
            Request([A], SamplingParams(beam=9, max_new_tokens=1)),
            "beam",
            "--beam 9 needs more sequences",
        ),
        ("rotary", Request([A], greedy(30, n=4)), "max_new_tokens", "needs room for 124 tokens"),
        ("translator", Request([A], greedy(1)), "source", "an encoder-decoder needs sources"),
        ("translator", Request([A], greedy(1), []), "source", "the source is empty"),
        ("translator", Request([A], greedy(1), [A] * 41), "source", "a source of 41 tokens"),
        ("translator", Request([A], greedy(1), [A, 99]), "source", "the source has the token 99"),
    ],
)
def test_what_can_never_be_answered_is_refused_by_its_field(
    name: str, request_: Request, param: str, message: str
) -> None:
    engine = engine_of(name, max_num_seqs=8, max_num_tokens=100)
    with pytest.raises(UserError, match=message) as caught:
        engine.check(request_)
    assert caught.value.param == param
    with pytest.raises(UserError, match=message):
        engine.submit(request_, print)
    assert not engine.step()


def test_prompts_to_score_share_a_call_while_their_logits_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scalerun.generation.engine.MAX_LOGITS", 2 * 4 * 16)
    engine = engine_of()
    calls = calls_of(engine)
    clients = [Client(engine, Request([A] * n, greedy(0, echo=True))) for n in (4, 3, 9, 1, 0)]
    plain = Client(engine, Request([A], greedy(1)))
    while engine.step():
        pass
    assert calls == [(2, 4), (1, 9), (2, 1), (1, 2)]
    assert len(plain.finished()) == 1
    for client in clients:
        [answer] = client.finished()
        assert (answer.tokens, answer.text, answer.finish_reason) == ([], "", "length")
        assert answer.prompt is not None
        assert len(answer.prompt.logprobs) == len(client.request.prompt)


def test_a_cut_prompt_is_scored_as_it_was_read() -> None:
    engine = engine_of()
    draw = random.Random(5)
    prompt = letters(draw, 60, 60)
    params = greedy(10, echo=True, logprobs=1, truncate_prompt=True)
    client = Client(engine, Request(prompt, params))
    while engine.step():
        pass
    event = client.events[0]
    assert isinstance(event, PromptEvent)
    assert event.tokens == prompt[-30:]
    truth = SlowReference(engine.model, LETTERS).prompt_logprobs(Request(prompt[-30:], params))
    assert event.score.logprobs == pytest.approx(truth, abs=1e-4)
    assert len(event.score.top_logprobs) == 30
    assert client.ticket.num_prompt_tokens == 30


def test_an_answer_depends_on_its_seed_and_number_and_not_on_how_many_there_are() -> None:
    engine = engine_of()
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "temperature": 2.0}
    few, many, other = (
        Client(engine, Request([A], SamplingParams(n=n, seed=seed, **settings)))  # type: ignore[arg-type]
        for n, seed in ((2, 5), (4, 5), (1, 6))
    )
    while engine.step():
        pass
    assert few.finished() == many.finished()[:2]
    texts = [answer.text for answer in many.finished() + other.finished()]
    assert len(set(texts)) == 5


def test_best_of_gives_the_answers_with_the_highest_logprob_per_token() -> None:
    engine = engine_of()
    settings = {"temperature": 2.0, "seed": 3, "max_new_tokens": 8}
    all_, best = (
        Client(engine, Request([A], SamplingParams(n=n, best_of=8, **settings)))  # type: ignore[arg-type]
        for n in (8, 3)
    )
    while engine.step():
        pass

    def mean(answer: Generation) -> float:
        return answer.score / (len(answer.tokens) + (answer.finish_reason == "stop"))

    ranked = sorted(all_.finished(), key=mean, reverse=True)
    assert best.finished() == ranked[:3]
    assert best.ticket.num_new_tokens == all_.ticket.num_new_tokens
    assert [event.choice for event in best.events if isinstance(event, TokenEvent)] == []


class Others(Control):
    """One rank of several; the others still have these calls to make: reads, prompts."""

    def __init__(self, *theirs: tuple[bool, bool]) -> None:
        super().__init__()
        self.theirs = list(theirs)

    def max(self, *values: float) -> list[float]:
        theirs = self.theirs.pop(0) if self.theirs else (False, False)
        return [max(own, float(other)) for own, other in zip(values, theirs, strict=True)]


def test_a_rank_calls_the_model_as_often_as_the_others() -> None:
    control = Others((False, True), (True, False), (True, True), (True, False))
    engine = engine_of(control=control)
    calls = calls_of(engine)
    client = Client(engine, Request([A, A], greedy(2)))
    assert [engine.step() for _ in range(5)] == [True] * 4 + [False]
    # Its own prompt and answer, then what the others need: twice a read, once a prompt.
    assert calls == [(1, 3), (1, 1), (1, 1), (1, 1), (1, 1)]
    assert len(client.finished()) == 1


def test_a_rank_that_fails_stays_until_the_others_are_done() -> None:
    control = Others((False, True), (True, False), (True, False))
    generator = SequenceGenerator(tiny_model("rotary"), LETTERS, control=control)
    seen: list[int] = []
    generator.model.layers[0].register_forward_pre_hook(  # type: ignore[union-attr, index]
        lambda module, inputs: seen.append(1)  # type: ignore[operator]
    )

    def fail(index: int, text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate([[A]], [greedy(5)], on_text=fail)
    assert len(seen) == 3
    assert control.theirs == []
