"""Which adapters are held: those in use, and the newest of the others; who waits gets its turn."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from areal_sc.engines.held_adapters import HeldAdapters
from areal_sc.errors import ModelError


class Engine:
    """Has adapters; one whose name is `bad` cannot be loaded."""

    def __init__(self, room: int = 2) -> None:
        self.log: list[str] = []
        self.places = HeldAdapters(room, self._size, self._load, self._unload)

    async def _size(self, folder: str) -> int:
        return 2 if folder.startswith("large") else 1

    async def _load(self, folder: str) -> str:
        await asyncio.sleep(0)
        if folder == "bad":
            raise ModelError("adapter bad")
        self.log.append(f"+{folder}")
        return folder

    async def _unload(self, adapter: str) -> None:
        self.log.append(f"-{adapter}")

    async def use(self, *folders: str) -> None:
        for folder in folders:
            async with self.places.using(folder) as adapter:
                assert adapter == folder

    async def begin(self, folder: str) -> tuple[asyncio.Task[None], asyncio.Event]:
        """A request that goes on until the event, and whatever can happen until then."""
        end = asyncio.Event()

        async def run() -> None:
            async with self.places.using(folder):
                await end.wait()

        task = asyncio.create_task(run())
        for _ in range(20):
            await asyncio.sleep(0)
        return task, end


async def test_the_least_recently_used_one_goes_first() -> None:
    engine = Engine()
    await engine.use("a", "b", "a", "c", "a", "b")
    assert engine.log == ["+a", "+b", "-b", "+c", "-c", "+b"]
    await engine.use("large")
    assert engine.log[6:] == ["-a", "-b", "+large"]


async def test_one_in_use_stays_and_the_next_waits_for_room() -> None:
    engine = Engine()
    first, end_first = await engine.begin("a")
    second, end_second = await engine.begin("b")
    third, end_third = await engine.begin("c")
    assert engine.log == ["+a", "+b"]
    again, end_again = await engine.begin("a")  # behind it, although its own is held
    end_second.set()
    await second
    await engine.use("c")
    assert engine.log == ["+a", "+b", "-b", "+c"]
    for end in (end_first, end_third, end_again):
        end.set()
    await asyncio.gather(first, third, again)


async def test_one_that_floods_does_not_keep_another_out() -> None:
    """Two adapters are always asked for, by more requests than one; the third gets its room."""
    engine = Engine()
    is_served = asyncio.Event()

    async def flood(folder: str) -> None:
        while not is_served.is_set():
            async with engine.places.using(folder):
                await asyncio.sleep(0)

    floods = [asyncio.create_task(flood(it)) for it in "aabb"]
    for _ in range(20):
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await engine.use("c")
    is_served.set()
    await asyncio.gather(*floods)


async def test_failures_and_requests_that_are_given_up_leave_nothing() -> None:
    engine = Engine(room=1)
    for _ in range(2):
        with pytest.raises(ModelError, match="adapter bad"):
            await engine.use("bad")
    with pytest.raises(ModelError, match="size of 2, and there is room for 1"):
        await engine.use("large")
    first, end = await engine.begin("a")
    waiting, _ = await engine.begin("b")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    end.set()
    await first
    running, _ = await engine.begin("a")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await engine.use("b")
    assert engine.log == ["+a", "-a", "+b"]


async def test_requests_of_one_adapter_share_it() -> None:
    engine = Engine(room=1)
    async with AsyncExitStack() as held, asyncio.TaskGroup() as tasks:
        for _ in range(5):
            tasks.create_task(held.enter_async_context(engine.places.using("a")))
    assert engine.log == ["+a"]
    assert engine.places.num_loads == 1
