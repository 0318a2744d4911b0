"""A tracker on a thread of its own, so that it can neither stop nor slow a run.

consumes     what happens in the run, in order
waits for    the tracker, at most `CLOSE_TIMEOUT_S` at the end of the run
unblocked by the tracker; a tracker that hangs is left behind, its thread ends with the process
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from areal_sc.records.trackers.base import Tracker
from areal_sc.user_code import blame

logger = logging.getLogger(__name__)

MAX_WAITING_EVENTS: Final = 1000
"""What a slow tracker may be behind; it is not told of what comes after."""

CLOSE_TIMEOUT_S: Final = 60.0
"""For all that is left to tell, at the end of a run."""

Event = Callable[[Tracker], None]


class BackgroundTracker:
    """Tells a tracker what happens, in order, without waiting for it.

    Args:
        tracker: is called on a thread of its own, which begins at once.
        warn: shows a warning; called on the thread of the run, at most once for each kind of
            trouble.
    """

    def __init__(self, tracker: Tracker, warn: Callable[[str], None]) -> None:
        self.name = type(tracker).__name__
        self._tracker = tracker
        self._warn = warn
        self._has_warned = False
        self._events: queue.Queue[Event | None] = queue.Queue(MAX_WAITING_EVENTS)
        self._first_error = ""
        self._num_failed = 0
        self._num_untold = 0
        self._thread = threading.Thread(
            target=self._tell_all, name=f"tracker {self.name}", daemon=True
        )
        self._thread.start()

    def tell(self, event: Event) -> None:
        """Hands over what happened; returns at once."""
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._num_untold += 1
        self._look()

    def close(self) -> None:
        """Gives the tracker `CLOSE_TIMEOUT_S` for what it has not been told yet."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        try:
            self._events.put(_close, timeout=CLOSE_TIMEOUT_S)
            self._events.put(None, timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Full:
            pass  # it hangs
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        self._look()
        left = self._events.qsize() + self._num_untold
        if self._thread.is_alive() or self._num_failed > 1 or left:
            is_slow = f"it did not end within {CLOSE_TIMEOUT_S:g} s, "
            how = is_slow if self._thread.is_alive() else f"{self._num_failed} calls failed, "
            self._warn(f"tracker {self.name}: {how}{left} events were missed")

    def _look(self) -> None:
        """Says once what is wrong with the tracker."""
        if not self._has_warned and (self._first_error or self._num_untold):
            self._has_warned = True
            why = (
                f"failed: {self._first_error}" if self._first_error else "misses events: it is slow"
            )
            self._warn(f"tracker {self.name} {why}; the run goes on without it")

    def _tell_all(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                event(self._tracker)
            except BaseException as error:  # the border of code of users and of other libraries
                self._num_failed += 1
                if not self._first_error:
                    logger.warning("tracker=%s", self.name, exc_info=True)
                    self._first_error = blame(error)


def _close(tracker: Tracker) -> None:
    tracker.close()
