"""Where requests go: by work ahead, and by group; and who waits."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.servers.dispatch import MAX_REMEMBERED_HOMES, Dispatcher, ServerLoad
from areal_sc.engines.servers.requests import CompletionRequest
from areal_sc.errors import EngineFailed


def make_dispatcher(
    *names: str, max_running: int = 1000
) -> tuple[Dispatcher[ServerLoad], list[ServerLoad]]:
    servers = [ServerLoad(name, max_running, is_open=True) for name in names]
    return Dispatcher(servers), servers


def work(num_tokens: int, group: str | None = None, version: int = 0) -> CompletionRequest:
    """A request that has, and may still get, so many tokens."""
    return CompletionRequest(
        prompt=[0] * num_tokens,
        sampling=GenerationConfig(),
        max_new_tokens=0,
        length_reason="length",
        stop_token_ids=(),
        prefix_group=group,
        is_truncated=False,
        min_version=version,
    )


async def names_of(dispatcher: Dispatcher[ServerLoad], *works: CompletionRequest) -> list[str]:
    """Where requests go that come one after the other."""
    servers = [await dispatcher.enter(each) for each in works]
    return [server.name for server in servers]


async def test_the_server_with_the_fewest_outstanding_tokens_is_taken() -> None:
    dispatcher, _ = make_dispatcher("a", "b", "c")
    # one long answer weighs as much as many short ones: no round-robin
    assert await names_of(dispatcher, work(1000)) == ["a"]
    names = Counter(await names_of(dispatcher, *[work(100)] * 20))
    assert names == {"b": 10, "c": 10}
    assert await names_of(dispatcher, work(100)) == ["a"]


async def test_a_slow_server_gets_less() -> None:
    """It has more tokens outstanding at the same rate of requests."""
    dispatcher, (slow, fast) = make_dispatcher("slow", "fast")
    names: Counter[str] = Counter()
    running: list[ServerLoad] = []
    for number in range(100):
        (name,) = await names_of(dispatcher, work(100))
        names[name] += 1
        running.append(slow if name == "slow" else fast)
        for server, every in ((fast, 1), (slow, 4)):
            if server in running and number % every == 0:
                running.remove(server)
                dispatcher.leave(server, work(100))
    assert names["fast"] > 2 * names["slow"] > 0


async def test_finished_work_is_taken_off() -> None:
    dispatcher, (a, b) = make_dispatcher("a", "b")
    assert await names_of(dispatcher, work(500)) == ["a"]
    assert dispatcher.choose(work(10)) is b
    dispatcher.leave(a, work(500))
    assert (a.num_running, a.outstanding_tokens) == (0, 0)
    assert dispatcher.choose(work(10)) is a


async def test_rows_of_a_group_stay_together_until_it_costs_too_much() -> None:
    dispatcher, _ = make_dispatcher("a", "b")
    assert set(await names_of(dispatcher, *[work(100, "g")] * 8)) == {"a"}
    assert set(await names_of(dispatcher, *[work(100, "h")] * 8)) == {"b"}
    many = Counter(await names_of(dispatcher, *[work(100, "g")] * 64))
    assert many["b"] >= 20  # a group that is much larger than usual is spread


async def test_closed_full_and_old_servers_are_left_out() -> None:
    dispatcher, (closed, full, old, good) = make_dispatcher("closed", "full", "old", "good")
    closed.is_open = False
    full.max_running = 0
    closed.version = full.version = good.version = 3
    old.version = 2
    assert dispatcher.choose(work(10, version=3)) is good
    good.is_open = False
    assert dispatcher.choose(work(10, version=3)) is None
    assert dispatcher.choose(work(10, version=2)) is old
    good.is_open = True
    good.version = dispatcher.newest_version = 1
    assert dispatcher.choose(work(10, version=3)) is old, "the run went back to version 1"


async def test_a_home_that_is_closed_is_left_and_forgotten_when_it_restarts() -> None:
    dispatcher, (a, b) = make_dispatcher("a", "b")
    assert await names_of(dispatcher, work(10, "g")) == ["a"]
    a.is_open = False
    assert dispatcher.choose(work(10, "g")) is b
    a.is_open = True
    assert dispatcher.choose(work(10, "g")) is a
    dispatcher.forget_homes(a)
    assert dispatcher.choose(work(10, "g")) is b


async def test_remembered_homes_are_bounded() -> None:
    dispatcher, _ = make_dispatcher("a", max_running=2 * MAX_REMEMBERED_HOMES)
    works = [work(1, str(number)) for number in range(MAX_REMEMBERED_HOMES + 10)]
    await names_of(dispatcher, *works)
    assert len(dispatcher._homes) == MAX_REMEMBERED_HOMES


async def test_requests_wait_in_order_for_room() -> None:
    dispatcher, (server,) = make_dispatcher("a", max_running=1)
    await dispatcher.enter(work(10))
    waiting = [asyncio.create_task(dispatcher.enter(work(10))) for _ in range(3)]
    await asyncio.sleep(0)
    assert dispatcher.num_waiting == 3
    for number in range(3):
        dispatcher.leave(server, work(10))
        assert await waiting[number] is server
        assert [task.done() for task in waiting] == [i <= number for i in range(3)]


async def test_one_who_cannot_be_placed_does_not_block_the_others() -> None:
    dispatcher, (server,) = make_dispatcher("a")
    newer = asyncio.create_task(dispatcher.enter(work(10, version=5)))
    await asyncio.sleep(0)
    assert await dispatcher.enter(work(10))
    assert not newer.done()
    server.version = 5
    dispatcher.changed()
    assert await newer


async def test_cancelled_requests_leave_no_trace() -> None:
    dispatcher, (server,) = make_dispatcher("a", max_running=1)
    await dispatcher.enter(work(10))
    waiting = asyncio.create_task(dispatcher.enter(work(10)))
    just_placed = asyncio.create_task(dispatcher.enter(work(10)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    dispatcher.leave(server, work(10))  # places the one that is left
    just_placed.cancel()  # in the same turn of the loop
    with pytest.raises(asyncio.CancelledError):
        await just_placed
    assert dispatcher.num_waiting == 0
    assert server.num_running == 0


async def test_a_failure_ends_all_waiting() -> None:
    dispatcher, _ = make_dispatcher("a", max_running=0)
    waiting = asyncio.create_task(dispatcher.enter(work(10)))
    await asyncio.sleep(0)
    dispatcher.fail(EngineFailed("no server is left"))
    for request in (waiting, dispatcher.enter(work(10))):
        with pytest.raises(EngineFailed, match="no server is left"):
            await request


async def test_until_empty() -> None:
    dispatcher, (server,) = make_dispatcher("a")
    await server.is_empty.wait()
    places = [await dispatcher.enter(work(10)) for _ in range(2)]
    empty = asyncio.create_task(server.is_empty.wait())
    for entered in places:
        await asyncio.sleep(0)
        assert not empty.done()
        dispatcher.leave(entered, work(10))
    await empty
