"""Waiting: for several coroutines at a time, with a limit, and for what only looking tells."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

from areal_sc.errors import WaitTimeout

logger = logging.getLogger(__name__)
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


FIRST_NOTICE_S: Final = 30.0
"""A wait is told after this time, and again each time that it has lasted twice as long."""


async def bounded(work: Awaitable[T], limit_s: float, what: str, setting: str) -> T:
    """The result of the work; warnings say meanwhile that it takes long.

    Time counts on the clock of the event loop, which stands still while the script is stopped.

    Args:
        work: is cancelled at the limit, as far as that is possible.
        what: is waited for, in words that follow "waited for".
        setting: the limit's name.
    Raises: WaitTimeout: it took longer than `limit_s`. What the work raises.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    began_s, notice_s = loop.time(), FIRST_NOTICE_S
    try:
        while True:
            waited_s = loop.time() - began_s
            await asyncio.wait([task], timeout=max(0.0, min(notice_s, limit_s) - waited_s))
            if task.done():
                return task.result()
            if loop.time() - began_s >= limit_s:
                raise WaitTimeout(f"waited for {what} for {limit_s:g} s, which {setting} allows")
            if loop.time() - began_s >= notice_s:
                limit = f"{setting} ends it after {limit_s:g} s"
                logger.warning("waited for %s for %.0f s; %s", what, notice_s, limit)
                notice_s *= 2
    finally:
        task.cancel()
