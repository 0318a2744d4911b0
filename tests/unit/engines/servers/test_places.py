"""Who gets a place on a server, and who waits."""

from __future__ import annotations

import asyncio

import pytest

from areal_sc.engines.servers.places import Places
from areal_sc.errors import EngineFailed


def open_places(num_places: int) -> Places:
    places = Places(num_places)
    places.set_open(True)
    return places


async def test_requests_wait_in_order_for_room() -> None:
    places = open_places(1)
    await places.enter()
    waiting = [asyncio.create_task(places.enter()) for _ in range(3)]
    await asyncio.sleep(0)
    assert places.num_waiting == 3
    for number in range(3):
        places.leave()
        await waiting[number]
        assert [task.done() for task in waiting] == [i <= number for i in range(3)]
    assert (places.num_running, places.num_waiting) == (1, 0)


async def test_nobody_enters_while_they_are_closed() -> None:
    places = Places(9)
    waiting = [asyncio.create_task(places.enter()) for _ in range(3)]
    for _ in range(9):
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    places.set_open(True)
    await asyncio.gather(*waiting)
    places.set_open(False)
    assert places.num_running == 3
    late = asyncio.create_task(places.enter())
    places.leave()
    for _ in range(9):
        await asyncio.sleep(0)
    assert not late.done()
    late.cancel()


async def test_cancelled_requests_leave_no_trace() -> None:
    places = open_places(1)
    await places.enter()
    first, second, third = (asyncio.create_task(places.enter()) for _ in range(3))
    await asyncio.sleep(0)
    places.leave()
    first.cancel()  # in the same turn of the loop
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await third
    assert (places.num_running, places.num_waiting) == (1, 0)


async def test_a_failure_ends_all_waiting() -> None:
    places = open_places(0)
    waiting = [asyncio.create_task(places.enter()) for _ in range(2)]
    await asyncio.sleep(0)
    places.fail(EngineFailed("the server is lost"))
    for request in (*waiting, places.enter()):
        with pytest.raises(EngineFailed, match="the server is lost"):
            await request


async def test_until_empty() -> None:
    places = open_places(9)
    await places.is_empty.wait()
    for _ in range(2):
        await places.enter()
    empty = asyncio.create_task(places.is_empty.wait())
    for _ in range(2):
        await asyncio.sleep(0)
        assert not empty.done()
        places.leave()
    await empty
