"""Bounded waits for what another process, thread or task brings about, and no event tells of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 180.0
"""Far above what anything here takes, for a machine that is busy with other work."""


def _pauses(now_s: Callable[[], float], limit_s: float) -> Iterator[float]:
    """Seconds until each next look: about a tenth of those that have been waited."""
    began_s = now_s()
    while (waited_s := now_s() - began_s) < limit_s:
        yield min(0.1, 0.001 + waited_s / 10)


async def until(is_so: Callable[[], T], limit_s: float = LIMIT_S, what: str = "it") -> T:
    """Returns the first true value of `is_so`; seconds are those of the event loop's clock."""
    for pause_s in _pauses(asyncio.get_running_loop().time, limit_s):
        if found := is_so():
            return found
        await asyncio.sleep(pause_s)
    raise AssertionError(f"waited {limit_s:g} s in vain for {what}")


def wait_until(is_so: Callable[[], T], limit_s: float = LIMIT_S, what: str = "it") -> T:
    """As `until`, where there is no event loop, or where it must not turn meanwhile."""
    for pause_s in _pauses(time.monotonic, limit_s):
        if found := is_so():
            return found
        time.sleep(pause_s)
    raise AssertionError(f"waited {limit_s:g} s in vain for {what}")


def is_running(pid: int) -> bool:
    """A zombie that nobody reaps, as in a container without init, has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
