import asyncio

import pytest

from scalerun.service.deadlines import Deadlines
from scalerun.service.errors import ApiError


def status_of(work):
    with pytest.raises(ApiError) as caught:
        asyncio.run(work)
    return caught.value.status, caught.value.code


def test_what_takes_too_long_is_a_timeout():
    async def work():
        deadlines = Deadlines(0.01)
        async with deadlines.limit(asyncio.get_running_loop().time()):
            await asyncio.sleep(60)

    assert status_of(work()) == (504, "timeout")


def test_time_runs_from_the_arrival():
    async def work():
        deadlines = Deadlines(5)
        async with deadlines.limit(asyncio.get_running_loop().time() - 6):
            await asyncio.sleep(60)

    assert status_of(work()) == (504, "timeout")


@pytest.mark.parametrize("entered_before", [True, False])
def test_a_server_that_ends_shortens_all_limits(entered_before):
    async def work():
        deadlines = Deadlines(60)
        if not entered_before:
            deadlines.end_within(0.01)
        async with deadlines.limit(asyncio.get_running_loop().time()):
            if entered_before:
                deadlines.end_within(0.01)
            await asyncio.sleep(60)

    assert status_of(work()) == (503, "stopping")


def test_a_limit_that_ends_sooner_anyway_is_not_made_longer():
    async def work():
        deadlines = Deadlines(0.01)
        async with deadlines.limit(asyncio.get_running_loop().time()):
            deadlines.end_within(60)
            await asyncio.sleep(60)

    assert status_of(work()) == (504, "timeout")


def test_what_is_done_in_time_is_left_alone():
    async def work():
        deadlines = Deadlines(60)
        async with deadlines.limit(asyncio.get_running_loop().time()):
            await asyncio.sleep(0)
        deadlines.end_within(0)
        await asyncio.sleep(0.01)
        return True

    assert asyncio.run(work())
