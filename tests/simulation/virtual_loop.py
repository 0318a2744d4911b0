"""An asyncio loop whose clock jumps: hours of waiting pass in milliseconds, the same way each time.

When nothing is ready to run, the clock is set to the next timer. Real file descriptors are still
polled, without waiting for them, so code that needs an answer from another thread or process does
not belong on this loop.

A run that cannot go on, or goes on for too long, ends with `Stalled`: a deadlock of the code under
test shows as an error, never as a hang.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

MAX_VIRTUAL_S = 1e6
MAX_TURNS = 2_000_000
"""Turns of the loop; one that is never idle does not move the clock."""


class Stalled(BaseException):
    """Nothing will ever happen again, or too much has. No code under test catches it."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time starts at 0 and passes only by waiting for it.

    Args:
        max_virtual_s: clock time after which the run counts as stalled.
        max_turns: turns after which it does.
    """

    def __init__(self, max_virtual_s: float = MAX_VIRTUAL_S, max_turns: int = MAX_TURNS) -> None:
        self._now_s = 0.0
        self._max_virtual_s = max_virtual_s
        self._max_turns = max_turns
        self._num_turns = 0
        self._is_stalled = False
        super().__init__(_ImpatientSelector(self._pass_time))

    def time(self) -> float:
        return self._now_s

    def _pass_time(self, timeout_s: float | None) -> None:
        self._num_turns += 1
        if self._is_stalled and self._num_turns < 2 * self._max_turns:
            self._now_s += timeout_s or 0.0
            return  # the clean-up after `Stalled` may take its turns
        if timeout_s is None:
            self._stall("nothing is ready and no timer is set: everybody waits for somebody")
            return
        self._now_s += timeout_s
        if self._now_s > self._max_virtual_s:
            self._stall(f"the clock has passed {self._max_virtual_s:g} s")
        if self._num_turns > self._max_turns:
            self._stall(f"{self._max_turns} turns at {self._now_s:g} s")

    def _stall(self, reason: str) -> None:
        self._is_stalled = True
        waiting = sorted(task.get_name() for task in asyncio.all_tasks(self) if not task.done())
        raise Stalled(f"{reason}; tasks: {', '.join(waiting[:20])}")


class _ImpatientSelector(selectors.DefaultSelector):
    """Hands what `select` would wait to the clock, and looks once."""

    def __init__(self, pass_time: Callable[[float | None], None]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> Any:
        self._pass_time(timeout)
        return super().select(0)


def run_virtual(
    coroutine: Coroutine[Any, Any, T],
    *,
    max_virtual_s: float = MAX_VIRTUAL_S,
    max_turns: int = MAX_TURNS,
) -> T:
    """Runs a coroutine to its end in virtual time.

    Raises: Stalled: it waits for what never comes.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(max_virtual_s, max_turns)) as runner:
        return runner.run(coroutine)
