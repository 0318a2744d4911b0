"""An operation runs once, whoever asks for it how often, and however the asking ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from areal_sc.errors import EngineFailed, ShardGone, StaleCall
from areal_sc.workers.operations import Kind, Operation, Operations, digest


class Engine:
    """Counts what is done to it, each time as long as the test wants."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.done: list[str] = []
        self.has_begun = asyncio.Event()
        self.goes_on = asyncio.Event()

    def change(self, name: str) -> Callable[[], Any]:
        async def run() -> dict[str, str]:
            self.begun.append(name)
            self.has_begun.set()
            await self.goes_on.wait()
            self.done.append(name)
            return {"did": name}

        return run


async def nothing() -> None:
    return None


def update(version: int, number: int = 0, content: str = "rows", lineage: int = 0) -> Operation:
    return Operation(lineage, version, Kind.update, str(number), content)


async def publish(operations: Operations, version: int) -> None:
    operation = Operation(operations.lineage, operations.version, Kind.publish, str(version))
    await operations.join(operation, nothing, next_version=version)


async def test_two_that_ask_at_once_get_one_run() -> None:
    engine, operations = Engine(), Operations("train/0")
    asked = [asyncio.create_task(operations.join(update(0), engine.change("a"))) for _ in range(2)]
    await asyncio.wait_for(engine.has_begun.wait(), 60.0)
    engine.goes_on.set()
    assert await asyncio.gather(*asked) == [{"did": "a"}] * 2
    assert await operations.join(update(0), engine.change("again")) == {"did": "a"}
    assert engine.begun == ["a"]


async def test_who_gives_up_does_not_end_it() -> None:
    engine, operations = Engine(), Operations("train/0")
    first = asyncio.create_task(operations.join(update(0), engine.change("a")))
    await asyncio.wait_for(engine.has_begun.wait(), 60.0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    repeat = asyncio.create_task(operations.join(update(0), engine.change("again")))
    publication = asyncio.create_task(publish(operations, 1))
    await asyncio.sleep(0)
    assert operations.version == 0, "what comes after waits for it"
    engine.goes_on.set()
    assert await repeat == {"did": "a"}
    await publication
    assert operations.version == 1
    # the version before is remembered, for the reply may have been lost
    assert await operations.join(update(0), engine.change("again")) == {"did": "a"}
    assert engine.begun == engine.done == ["a"]


async def test_another_version_or_lineage_is_refused_by_both_names() -> None:
    engine, operations = Engine(), Operations("train/0")
    engine.goes_on.set()
    for version in range(1, 6):
        await publish(operations, version)
    for version, lineage in ((4, 0), (6, 0), (5, 1)):
        expected = (
            f"update 0 at lineage {lineage}, policy version {version}: "
            "train/0 is at lineage 0, policy version 5"
        )
        with pytest.raises(StaleCall, match=expected):
            await operations.join(update(version, lineage=lineage), engine.change("a"))
    assert engine.begun == []
    await operations.join(update(5), engine.change("a"))
    assert engine.done == ["a"]


async def test_a_repeat_must_be_about_the_same() -> None:
    engine, operations = Engine(), Operations("train/0")
    engine.goes_on.set()
    await operations.join(update(0), engine.change("a"))
    with pytest.raises(StaleCall, match=r"update 0 at .* asked for before, with something else"):
        await operations.join(update(0, content="others"), engine.change("b"))
    await operations.join(update(0, number=1, content="others"), engine.change("b"))
    assert engine.done == ["a", "b"]


async def test_what_failed_before_it_changed_anything_may_be_repeated() -> None:
    engine, operations = Engine(), Operations("train/0")
    engine.goes_on.set()

    async def pull() -> None:
        raise ShardGone("the rows are gone")

    with pytest.raises(ShardGone):
        await operations.join(update(0), pull)
    assert await operations.join(update(0), engine.change("a")) == {"did": "a"}
    assert engine.done == ["a"]


async def test_after_a_change_that_failed_only_a_snapshot_helps() -> None:
    engine, operations = Engine(), Operations("train/0")
    engine.goes_on.set()

    async def fail() -> None:
        with operations.changing(update(0)):
            raise MemoryError("in the second minibatch")

    with pytest.raises(MemoryError):
        await operations.join(update(0), fail)
    reason = r"update 0 .* failed on train/0.*MemoryError.*second minibatch.*load a snapshot"
    for _ in range(2):
        with pytest.raises(EngineFailed, match=reason):
            await operations.join(update(0), engine.change("again"))
    with pytest.raises(EngineFailed, match=reason):
        await publish(operations, 1)
    assert (operations.version, engine.begun) == (0, [])
    load = Operation(1, 7, Kind.load)
    for _ in range(2):  # a repeat joins, too
        await operations.join(load, nothing, next_version=7, begins_lineage=True)
    await operations.join(update(7, lineage=1), engine.change("a"))
    assert engine.done == ["a"]
    with pytest.raises(StaleCall, match=r"load at lineage 1, .* is at lineage 1, policy version 7"):
        await operations.join(Operation(1, 5, Kind.load), nothing, begins_lineage=True)


async def test_memory_is_bounded() -> None:
    operations = Operations("train/0")
    for version in range(1, 200):
        await operations.join(update(version - 1), nothing)
        await publish(operations, version)
        assert len(operations._noted) <= 4
    await operations.join(Operation(1, 3, Kind.load), nothing, next_version=3, begins_lineage=True)
    assert len(operations._noted) == 1


async def test_an_end_leaves_nobody_waiting() -> None:
    engine, operations = Engine(), Operations("train/0")
    asked = [
        asyncio.create_task(operations.join(update(0, number), engine.change("a")))
        for number in range(2)
    ]
    await asyncio.wait_for(engine.has_begun.wait(), 60.0)
    await operations.close()
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2


def test_digests_tell_contents_apart() -> None:
    rows = [[3, 0, 17, 0.5], [4, 1, 9, None]]
    assert digest(rows) == digest([tuple(row) for row in rows])
    assert digest(rows) != digest([[3, 0, 17, 0.5], [4, 2, 9, None]])
