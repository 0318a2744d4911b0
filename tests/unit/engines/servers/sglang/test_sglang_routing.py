"""Where requests go: by work ahead, by speed, by group; and who waits."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from areal_sc.engines.servers.sglang.dispatch import Dispatcher, Place
from areal_sc.engines.servers.sglang.routing import MAX_REMEMBERED_GROUPS, Router, ServerLoad, Work
from areal_sc.errors import EngineFailed


def make_router(*names: str, max_running: int = 1000) -> Router:
    return Router([ServerLoad(name, max_running, is_open=True) for name in names])


def place(router: Router, work: Work) -> ServerLoad:
    server = router.choose(work)
    assert server
    router.start(server, work)
    return server


def work(num_tokens: int, prompt: int = 0, group: str | None = None, version: int = 0) -> Work:
    return Work(prompt, num_tokens, group, version)


def test_the_server_with_the_least_work_ahead_is_taken() -> None:
    router = make_router("a", "b", "c")
    # one long answer weighs as much as many short ones: no round-robin
    assert place(router, work(1000)).name == "a"
    names = Counter(place(router, work(100)).name for _ in range(20))
    assert names == {"b": 10, "c": 10}
    assert place(router, work(100)).name == "a"


def test_a_slow_server_gets_less() -> None:
    router = make_router("slow", "fast")
    slow, fast = router.servers
    for _ in range(3):
        router.observe(slow, 100, seconds=4.0)
        router.observe(fast, 100, seconds=1.0)
    names = Counter(place(router, work(100)).name for _ in range(100))
    assert names == {"fast": 80, "slow": 20}


def test_a_slow_server_that_becomes_fast_gets_its_share_again() -> None:
    router = make_router("a", "b")
    slow, fast = router.servers
    router.observe(slow, 100, seconds=10.0)
    router.observe(fast, 100, seconds=1.0)
    for _ in range(40):
        router.observe(slow, 100, seconds=1.0)
    names = Counter(place(router, work(100)).name for _ in range(100))
    assert abs(names["a"] - names["b"]) <= 2


def test_finished_work_is_taken_off() -> None:
    router = make_router("a", "b")
    server = router.servers[0]
    cost = router.start(server, work(500))
    assert router.choose(work(10)) is router.servers[1]
    router.finish(server, cost)
    assert (server.num_running, server.outstanding_tokens) == (0, 0.0)
    assert router.choose(work(10)) is server


def test_expected_lengths_are_learned() -> None:
    """A limit that nobody reaches says nothing about the work."""
    router = make_router("a", "b")
    for _ in range(30):
        router.observe(router.servers[0], 50, seconds=1.0)
        router.observe(router.servers[1], 50, seconds=1.0)
    cost = router.start(router.servers[0], work(16_000, prompt=100))
    assert cost == pytest.approx(60)


def test_rows_of_a_group_stay_together_until_it_costs_too_much() -> None:
    router = make_router("a", "b")
    first = [place(router, work(100, prompt=50, group="g")).name for _ in range(8)]
    assert set(first) == {"a"}
    second = [place(router, work(100, prompt=50, group="h")).name for _ in range(8)]
    assert set(second) == {"b"}
    many = Counter(place(router, work(100, prompt=50, group="g")).name for _ in range(64))
    assert many["b"] >= 20  # a group that is much larger than usual is spread


def test_closed_full_and_old_servers_are_left_out() -> None:
    router = make_router("closed", "full", "old", "good")
    closed, full, old, good = router.servers
    closed.is_open = False
    full.max_running = 0
    closed.version = full.version = good.version = 3
    old.version = 2
    assert router.choose(work(10, version=3)) is good
    good.is_open = False
    assert router.choose(work(10, version=3)) is None
    assert router.choose(work(10, version=2)) is old


def test_a_home_that_is_closed_is_left_and_forgotten_when_it_restarts() -> None:
    router = make_router("a", "b")
    a, b = router.servers
    assert place(router, work(10, group="g")) is a
    a.is_open = False
    assert router.choose(work(10, group="g")) is b
    a.is_open = True
    router.observe(a, 10, seconds=1.0)
    router.forget(a)
    assert a.seconds_per_token is None
    router.start(a, work(50))
    assert router.choose(work(10, group="g")) is b


def test_remembered_groups_are_bounded() -> None:
    router = make_router("a", max_running=2 * MAX_REMEMBERED_GROUPS)
    for number in range(MAX_REMEMBERED_GROUPS + 10):
        place(router, work(1, group=str(number)))
    assert len(router._group_servers) == MAX_REMEMBERED_GROUPS


def never() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_requests_wait_in_order_for_room() -> None:
    dispatcher = Dispatcher(make_router("a", max_running=1))
    first = await dispatcher.enter(work(10), never())
    assert first
    waiting = [asyncio.create_task(dispatcher.enter(work(10), never())) for _ in range(3)]
    await asyncio.sleep(0)
    assert dispatcher.num_waiting == 3
    held: Place | None = first
    for number in range(3):
        assert held
        dispatcher.leave(held)
        held = await waiting[number]
        assert [task.done() for task in waiting] == [i <= number for i in range(3)]


async def test_one_who_cannot_be_placed_does_not_block_the_others() -> None:
    dispatcher = Dispatcher(make_router("a"))
    newer = asyncio.create_task(dispatcher.enter(work(10, version=5), never()))
    await asyncio.sleep(0)
    assert await dispatcher.enter(work(10), never())
    assert not newer.done()
    dispatcher.router.servers[0].version = 5
    dispatcher.changed()
    assert await newer


async def test_cancelled_requests_leave_no_trace() -> None:
    dispatcher = Dispatcher(make_router("a", max_running=1))
    first = await dispatcher.enter(work(10), never())
    assert first
    given_up = never()
    by_event = asyncio.create_task(dispatcher.enter(work(10), given_up))
    by_task = asyncio.create_task(dispatcher.enter(work(10), never()))
    just_placed = asyncio.create_task(dispatcher.enter(work(10), never()))
    await asyncio.sleep(0)
    given_up.set_result(None)
    by_task.cancel()
    assert await by_event is None
    with pytest.raises(asyncio.CancelledError):
        await by_task
    dispatcher.leave(first)  # places the one that is left
    just_placed.cancel()  # in the same turn of the loop
    with pytest.raises(asyncio.CancelledError):
        await just_placed
    assert dispatcher.num_waiting == 0
    assert dispatcher.router.servers[0].num_running == 0


async def test_a_failure_ends_all_waiting() -> None:
    dispatcher = Dispatcher(make_router("a", max_running=0))
    waiting = asyncio.create_task(dispatcher.enter(work(10), never()))
    await asyncio.sleep(0)
    dispatcher.fail(EngineFailed("no server is left"))
    for request in (waiting, dispatcher.enter(work(10), never())):
        with pytest.raises(EngineFailed, match="no server is left"):
            await request


async def test_until_empty() -> None:
    dispatcher = Dispatcher(make_router("a"))
    server = dispatcher.router.servers[0]
    await dispatcher.until_empty(server)
    places = [await dispatcher.enter(work(10), never()) for _ in range(2)]
    empty = asyncio.create_task(dispatcher.until_empty(server))
    for entered in places:
        await asyncio.sleep(0)
        assert not empty.done()
        assert entered
        dispatcher.leave(entered)
    await empty
