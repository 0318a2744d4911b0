"""Waiting for several coroutines at a time, and for what only looking tells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results, or the first failure by its own name; the others are then cancelled."""
    waiting = list(coroutines)
    if len(waiting) == 1:
        return [await waiting[0]]
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in waiting]
    except BaseExceptionGroup as group_error:
        failure = group_error.exceptions[0]  # the others followed from it, or came after it
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # with the traceback it would keep itself, and what its frames hold
    return [task.result() for task in tasks]


async def first_of(*ways: Awaitable[T]) -> T:
    """The result of whichever ends first, or its failure; the others are then cancelled.

    Of several that have ended at one time the first one counts.
    """
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Returns when these tasks have ended; what they raise is nobody's business any more."""
    ends = list(tasks)
    for task in ends:
        task.cancel()
    await asyncio.gather(*ends, return_exceptions=True)


def polled(
    look: Callable[[], T],
    limit_s: float,
    every_s: float = 0.1,
    until: Callable[[T], bool] = bool,
) -> T:
    """The first value of `look` that will do, or the last one before the limit."""
    give_up_s = time.monotonic() + limit_s
    while not until(found := look()) and (left_s := give_up_s - time.monotonic()) > 0:
        time.sleep(min(every_s, left_s))
    return found
