import asyncio
import contextlib

import pytest
import torch

from scalerun.dataclass.errors import UserError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.generation.events import FailedEvent, FinishedEvent, Generation, TokenEvent
from scalerun.generation.request import Request
from scalerun.service.errors import ApiError
from scalerun.service.metrics import ServiceMetrics
from scalerun.service.scheduler import Scheduler

REQUEST = Request([1], SamplingParams(max_new_tokens=3))


class Ticket:
    num_new_tokens = 0


class ScriptedEngine:
    """Gives each request the events that it was told to, one a step."""

    num_live = 0

    def __init__(self, script):
        self.script = script
        self.going = {}
        self.cancelled = []

    def submit(self, request, listener):
        ticket = Ticket()
        self.going[ticket] = (listener, iter(self.script))
        return ticket

    def cancel(self, ticket):
        self.cancelled.append(ticket)
        self.going.pop(ticket, None)

    def step(self):
        for ticket, (listener, events) in list(self.going.items()):
            event = next(events, None)
            if isinstance(event, BaseException):
                raise event
            if event is None:
                del self.going[ticket]
            else:
                listener(event)
        return bool(self.going)


TOKEN = TokenEvent(0, 7, "a", -1.0, [])
END = FinishedEvent(0, "", Generation([7], [-1.0], "a", "length", -1.0))


def run(script, work, *, max_queue=8):
    """Let ``work`` use a scheduler; return the scheduler, ended, and what the work gave."""
    faults = []

    async def all_of_it():
        scheduler = Scheduler(
            ScriptedEngine(script),
            max_queue=max_queue,
            autocast=contextlib.nullcontext,
            metrics=ServiceMetrics(),
        )
        scheduler.start(on_fault=lambda: faults.append(True))
        try:
            return scheduler, await asyncio.wait_for(work(scheduler), 20)
        finally:
            scheduler.close()

    scheduler, result = asyncio.run(all_of_it())
    assert bool(faults) == scheduler.is_broken
    return scheduler, result


async def all_events(call):
    found = []
    while events := await call.take():
        found += events
    return found


def test_events_come_in_order_and_end():
    async def work(scheduler):
        return await all_events(scheduler.submit([REQUEST, REQUEST]))

    scheduler, events = run([TOKEN, TOKEN, END], work)
    for index in (0, 1):
        assert [event for i, event in events if i == index] == [TOKEN, TOKEN, END]
    assert scheduler.queue_length == 0


def test_a_failed_request_ends():
    failed = FailedEvent(UserError("the model's output is not finite"))

    async def work(scheduler):
        return await all_events(scheduler.submit([REQUEST]))

    assert run([TOKEN, failed], work)[1] == [(0, TOKEN), (0, failed)]


def test_who_leaves_is_cancelled_and_hears_no_more():
    async def work(scheduler):
        call = scheduler.submit([REQUEST, REQUEST])
        await call.take()
        scheduler.leave(call)
        scheduler.leave(call)
        other = scheduler.submit([REQUEST])
        await other.take()
        return set(scheduler.engine.cancelled), set(call.tickets)

    _, (cancelled, tickets) = run([TOKEN] * 1000, work)
    assert len(tickets) == 2
    assert cancelled == tickets


def test_the_queue_takes_all_prompts_of_a_request_or_none():
    async def work(scheduler):
        scheduler.submit([REQUEST, REQUEST])
        with pytest.raises(ApiError) as full:
            scheduler.submit([REQUEST, REQUEST])
        with pytest.raises(ApiError) as never:
            scheduler.submit([REQUEST] * 4)
        scheduler.submit([REQUEST])
        return full.value, never.value

    _, (full, never) = run([], work, max_queue=3)
    assert (full.status, full.retry_after) == (429, 1)
    assert (never.status, never.param) == (400, "prompt")


def test_a_prompt_whose_answers_are_ranked_waits_only_until_the_engine_begins():
    async def work(scheduler):
        call = scheduler.submit([REQUEST, REQUEST])
        before = scheduler.queue_length
        while len(call.tickets) < 2:
            await asyncio.sleep(0)
        call.tickets[0].num_new_tokens = 1
        return before, scheduler.queue_length

    assert run([], work)[1] == (2, 1)


def test_one_that_stops_takes_nothing():
    async def work(scheduler):
        scheduler.is_stopping = True
        scheduler.submit([REQUEST])

    with pytest.raises(ApiError, match="stopping") as caught:
        run([], work)
    assert caught.value.status == 503


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RuntimeError("a bug"), None),
        (
            torch.OutOfMemoryError("CUDA out of memory.\nMore."),
            "--max-num-seqs or --max-num-tokens",
        ),
    ],
)
def test_where_the_engine_breaks_down_everybody_hears_of_it(error, fault):
    async def work(scheduler):
        call = scheduler.submit([REQUEST])
        with pytest.raises(ApiError) as told:
            await all_events(call)
        with pytest.raises(ApiError) as later:
            scheduler.submit([REQUEST])
        return told.value, later.value

    scheduler, (told, later) = run([TOKEN, error], work)
    assert (told.status, later.status) == (500, 503)
    assert "bug" not in told.message
    assert scheduler.is_broken
    assert (scheduler.fault is None) == (fault is None)
    assert fault is None or fault in str(scheduler.fault)


def test_events_after_the_end_of_the_loop_do_no_harm():
    async def begin():
        scheduler = Scheduler(
            ScriptedEngine([TOKEN] * 100_000),
            max_queue=8,
            autocast=contextlib.nullcontext,
            metrics=ServiceMetrics(),
        )
        scheduler.start(on_fault=lambda: None)
        await scheduler.submit([REQUEST]).take()
        return scheduler

    scheduler = asyncio.run(begin())
    scheduler.close()
    assert not scheduler.is_broken
