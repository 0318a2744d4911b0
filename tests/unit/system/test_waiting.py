"""The first failure of several is told by its own name; what is looked for is seen, or given up."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from areal_sc.system.waiting import all_of, polled


async def test_results_come_in_order() -> None:
    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert await all_of(map(after, (3, 1, 2))) == [3, 1, 2]
    assert await all_of([after(1)]) == [1]
    assert await all_of([]) == []


async def test_the_first_failure_is_raised_and_the_others_are_cancelled() -> None:
    ended = []

    async def never() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("never")

    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        await all_of([never(), fail()])
    assert ended == ["never"]


def test_looking_ends_with_what_is_seen_or_with_the_limit() -> None:
    assert polled(itertools.count().__next__, 60.0, 0.001) == 1
    looks = []
    assert polled(lambda: looks.append(1), 0.0) is None
    assert len(looks) == 1
