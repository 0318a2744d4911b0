"""Deadlines of many waits, of which few are reached, at the price of few timers.

consumes     waits with a deadline, which leave again when they end
waits for    the end of each tick in which a deadline lies
unblocked by the event loop's clock

A timer of its own for every call is a tenth of what the call costs.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

TICKS_PER_S: Final = 20
SHARE_LATE: Final = 1 / 64
"""A wait may expire late by this share of its length, so that long waits can share a timer: else
many calls that may take an hour would fill that hour with timers."""


class Wait(Protocol):
    """What has a deadline."""

    def expire(self) -> None: ...


class Deadlines:
    """Must be made on a running event loop.

    A deadline is noticed late by up to a tick, or a 64th of its time where that is more.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ticks: dict[int, set[Wait]] = {}

    def within(self, timeout_s: float) -> set[Wait]:
        """The waits that expire together with one of `timeout_s` from now.

        Whoever waits adds itself, and takes itself out again when it need wait no more.
        """
        num_ticks = 1 << int(timeout_s * TICKS_PER_S * SHARE_LATE / 2).bit_length()
        tick = (int((self._loop.time() + timeout_s) * TICKS_PER_S) // num_ticks + 1) * num_ticks
        waits = self._ticks.get(tick)
        if waits is None:
            waits = self._ticks[tick] = set()
            self._loop.call_at(tick / TICKS_PER_S, self._expire, tick)
        return waits

    def _expire(self, tick: int) -> None:
        for wait in list(self._ticks.pop(tick)):
            wait.expire()
