"""Shares out an event loop among the connections that move bulk data on it.

consumes     connections that can move something
waits for    the loop's next turn, once this turn's time is used up
unblocked by the loop; whoever has waited longest goes first

Without it every connection that is ready would move a frame or more in each turn of the loop, and
with tens of them RPCs, timers and handshakes would wait for hundreds of milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

TURN_S: Final = 0.004
"""Of each turn of the event loop; a move that has begun is not cut short."""


class Turns:
    """Used on one event loop; connections that share it share the loop's time."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], bool]] = deque()
        self._ends_s: float | None = None  # time on `monotonic`, while a turn has begun
        self._is_moving = False

    def ask(self, move: Callable[[], bool]) -> None:
        """Calls `move`, at once if there is time in this turn, until it returns False.

        Args:
            move: moves a frame or so, and tells whether it could move more now. It must not raise.
        """
        self._waiting.append(move)
        if self._ends_s is None:
            self._begin()
        elif not self._is_moving:
            self._move(self._ends_s)

    def _begin(self) -> None:
        self._ends_s = time.monotonic() + TURN_S
        asyncio.get_running_loop().call_soon(self._end)
        self._move(self._ends_s)

    def _move(self, ends_s: float) -> None:
        self._is_moving = True
        try:
            while self._waiting and time.monotonic() < ends_s:
                move = self._waiting.popleft()
                if move():
                    self._waiting.append(move)
        finally:
            self._is_moving = False

    def _end(self) -> None:
        """The next turn of the loop has come: those that wait go before what is ready now."""
        self._ends_s = None
        if self._waiting:
            self._begin()
