"""The controllers' event loop: its clock stands still while the loop cannot turn.

A script can be stopped (SIGSTOP, Ctrl-Z, a debugger), or hold the interpreter's lock in C code of
its user. Replies and heartbeats then lie unread in the sockets, and every time limit of the
controllers would blame the workers for it. So all of them count the time of this loop.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import Any, Final

MAX_GAP_S: Final = 0.25
"""At most this much of the time between two looks at the clock counts."""

MAX_SELECT_S: Final = 0.1
"""An idle loop looks at the clock at least this often, so that all of its idle time counts."""


class PausableLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes only while it turns.

    Args:
        clock: seconds that also pass during a pause.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._paused_s = 0.0
        super().__init__(_ShortSelector())

    def time(self) -> float:
        """Seconds, without those of pauses."""
        now_s = self._clock()
        self._paused_s += max(0.0, now_s - self._looked_s - MAX_GAP_S)
        self._looked_s = now_s
        return now_s - self._paused_s


class _ShortSelector(selectors.DefaultSelector):
    """Never waits for long."""

    def select(self, timeout: float | None = None) -> Any:
        return super().select(MAX_SELECT_S if timeout is None else min(timeout, MAX_SELECT_S))
