"""The places of a server: it has as many requests as it runs at one time, and the rest wait here.

consumes     requests; what becomes of the server
waits for    a free place, while the server takes requests; first come, first served
unblocked by `leave` and `set_open`; `fail`, once the server is lost
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from areal_sc.errors import ArealError


class BusyTime:
    """Integrates the number of running answers over time.

    Attributes:
        busy_s: time in which there was at least one.
        answer_s: the same, counted once for each of them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.busy_s = 0.0
        self.answer_s = 0.0
        self._clock = clock
        self._at_s = clock()
        self._num_running = 0

    def note_running(self, num_running: int) -> None:
        """Brings the times up to now; from now on `num_running` answers run."""
        now_s = self._clock()
        passed_s = now_s - self._at_s
        self.busy_s += passed_s if self._num_running else 0.0
        self.answer_s += passed_s * self._num_running
        self._at_s = now_s
        self._num_running = num_running


class Places:
    """Places on one server.

    Args:
        num_places: more requests would queue inside the server.

    Attributes:
        is_open: requests may take places now.
        failure: why none can take a place any more, or None.
        num_running: requests that have a place.
        num_waiting: requests that wait for one.
        is_empty: set while no request has a place.
        busy: how long requests had places, and how many.
    """

    def __init__(self, num_places: int) -> None:
        self.is_open = False
        self.failure: ArealError | None = None
        self.num_running = 0
        self.num_waiting = 0
        self.is_empty = asyncio.Event()
        self.is_empty.set()
        self.busy = BusyTime()
        self._num_places = num_places
        self._turn = asyncio.Lock()  # of the request that gets the next place
        self._changed = asyncio.Event()

    async def enter(self) -> None:
        """Waits for a place and takes it, to be given back with `leave`.

        Raises: what `fail` was given.
        """
        self.num_waiting += 1
        try:
            async with self._turn:
                while self.failure is None and not self._has_room:
                    self._changed.clear()
                    await self._changed.wait()
                if self.failure is not None:
                    raise self.failure
                self._note_running(self.num_running + 1)
        finally:
            self.num_waiting -= 1

    def leave(self) -> None:
        """A request gives its place back, however it ended."""
        self._note_running(self.num_running - 1)
        self._changed.set()

    def set_open(self, is_open: bool) -> None:
        """Whether requests may take places; those that have one keep it."""
        self.is_open = is_open
        self._changed.set()

    def fail(self, error: ArealError) -> None:
        """Ends all waiting, and every later `enter`, with this error."""
        self.failure = error
        self._changed.set()

    @property
    def _has_room(self) -> bool:
        return self.is_open and self.num_running < self._num_places

    def _note_running(self, num_running: int) -> None:
        self.num_running = num_running
        self.busy.note_running(num_running)
        if num_running:
            self.is_empty.clear()
        else:
            self.is_empty.set()
