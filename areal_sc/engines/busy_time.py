"""How long something that generates was busy, and with how many answers."""

from __future__ import annotations

import time
from collections.abc import Callable


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
