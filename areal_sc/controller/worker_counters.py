"""Counters of workers that go on through all lives of a worker.

A new life counts from 0 again. What the lives before have counted, as far as they were asked, is
added, so that no counter ever falls, and what a step takes for its own is the difference of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OF_NOW: Final = (
    *("store_bytes", "store_shards", "mapped_retired_bytes"),
    *("running_requests", "waiting_requests", "occupied_places"),
)
"""What a worker has now, and loses with its life; all else are counts."""


class WorkerCounters:
    """The counters of one worker through all its lives.

    Attributes:
        newest: those of its newest life, when it was asked last.
    """

    def __init__(self) -> None:
        self._incarnation = ""
        self.newest: Mapping[str, float] = {}
        self._past: dict[str, float] = {}

    def add(self, incarnation: str, counters: Mapping[str, float]) -> None:
        """What a life of the worker says."""
        if incarnation != self._incarnation:
            self._past = self.total(is_alive=False)
            self._incarnation = incarnation
        self.newest = counters

    def total(self, *, is_alive: bool) -> dict[str, float]:
        """The counters of all lives together.

        Args:
            is_alive: the newest one goes on, and has what it had.
        """
        newest = {k: v for k, v in self.newest.items() if is_alive or k not in OF_NOW}
        return {**self._past, **{k: self._past.get(k, 0) + v for k, v in newest.items()}}
