"""A wait with a limit, that tells what is waited for and since when."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Final, TypeVar

from areal_sc.errors import WaitTimeout

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
